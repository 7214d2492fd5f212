"""`gpudiag doctor`: what is installed, what is missing, what that costs, and the fix of each."""
