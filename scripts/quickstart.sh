#!/usr/bin/env bash
# From nothing to a first table: .venv, the offline model and text, then one run.
#   bash scripts/quickstart.sh                                    method=h2o budget=1000
#   bash scripts/quickstart.sh method=kivi4 measure='[memory]'    any overrides of `python -m kvbench`
set -euo pipefail
source "$(dirname "$0")/common.sh"

set_up
fetch
if [ $# -eq 0 ]; then
    set -- method=h2o budget=1000
fi
exec "$python" -m kvbench "$@"
