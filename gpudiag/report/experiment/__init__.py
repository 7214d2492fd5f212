"""How experiments are shown: in a terminal, while they run, as Markdown, as a page, in a notebook."""
