"""`python -m kvbench method=h2o budget=1000`. See `kvbench.cli.main`."""

from kvbench.cli.main import main
from kvbench.errors import exit_with

if __name__ == "__main__":
    exit_with(main)
