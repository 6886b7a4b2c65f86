"""From rows on disk to tables, figures and one page: `python -m kvbench.report PATH`. Imports no torch."""
