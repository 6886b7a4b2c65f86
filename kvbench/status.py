"""`python -m kvbench.status results/sweep_...`: progress of a sweep. See `kvbench.cli.status`."""

from kvbench.cli.status import main
from kvbench.errors import exit_with

if __name__ == "__main__":
    exit_with(main)
