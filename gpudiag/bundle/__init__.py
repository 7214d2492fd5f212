"""The format of a bundle on disk: what stands where, how it is written and read."""
