"""One Report, many renderings: text, HTML, Markdown, JSON."""
