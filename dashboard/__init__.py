"""The dashboard: recordings of a folder in a browser. `gpudiag dashboard [DIR]` starts it; `app.create_app` makes it."""
