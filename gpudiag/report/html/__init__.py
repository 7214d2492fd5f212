"""One self-contained HTML file."""
