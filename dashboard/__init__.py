"""The Dash dashboard (not built yet: `gpudiag report -o report.html` is the view of today)."""
