"""From rows on disk to tables, plots and one page: `python -m kvbench.report PATH`. Imports no torch."""
