"""`gpudiag scrub`: a copy of a recording that may be shared."""
