"""What training a module tree would take: its steps are run on tensors that have shapes but no data."""
