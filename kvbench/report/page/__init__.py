"""The report as files: HTML, Markdown, LaTeX, CSV, and the commands that reproduce its lines."""
