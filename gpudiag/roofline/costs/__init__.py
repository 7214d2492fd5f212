"""Cost models: one small file per op family."""
