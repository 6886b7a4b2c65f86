#!/usr/bin/env bash
# Lint, types and the whole fast test suite:  bash scripts/test.sh [pytest arguments]
set -euo pipefail
source "$(dirname "$0")/common.sh"

set_up test
fetch
"$python" -m ruff check
"$python" -m ruff format --check
"$python" -m mypy
# Two processes of one thread each beat one process of two on models this small.
export OMP_NUM_THREADS=1
exec "$python" -m pytest -n 2 --dist loadfile "$@"
