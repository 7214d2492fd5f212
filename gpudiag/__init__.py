"""gpudiag: why a PyTorch training step takes as long as it does. Public names resolve lazily; see api.py."""
