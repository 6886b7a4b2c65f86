"""`python -m kvbench.plan model=llama3.1-8b context=32768`: cache bytes by formula. See `kvbench.cli.plan`."""

from kvbench.cli.plan import main
from kvbench.errors import exit_with

if __name__ == "__main__":
    exit_with(main)
