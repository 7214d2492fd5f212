"""What gpudiag says, checked on a real device: one file for each part; `samples/gpu/validate.py` runs them."""
