"""The folder that `gpudiag run` puts first on PYTHONPATH: it holds nothing but the sitecustomize.py that Python loads from there."""
