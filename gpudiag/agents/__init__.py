"""What a coding agent asks gpudiag: the questions as tools, their answers in pages, and the server that a client of MCP starts."""
