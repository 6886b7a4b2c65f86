"""`python -m kvbench.board results/`: a page of verified run folders. See `kvbench.report.page.board`."""

from kvbench.errors import exit_with
from kvbench.report.page.board import main

if __name__ == "__main__":
    exit_with(main)
