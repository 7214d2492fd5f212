"""What a run uses memory for: the allocator's history, and which tensors own what is alive."""
