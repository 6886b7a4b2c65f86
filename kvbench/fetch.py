"""`python -m kvbench.fetch smollm2-135m essays`: the offline model and text. See `kvbench.cli.fetch`."""

from kvbench.cli.fetch import main
from kvbench.errors import exit_with

if __name__ == "__main__":
    exit_with(main)
