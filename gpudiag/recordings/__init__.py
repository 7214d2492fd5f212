"""Recordings as they lie on disk: which ones given paths name, what a folder holds, how far one that is being made has come."""
