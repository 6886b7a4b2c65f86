#!/usr/bin/env bash
# Compare kvbench with kvpress on the same weights and tokens, and write docs/peers.md:
#     bash scripts/peers/run.sh [--context 1024 --tokens 32 --windows 2 --budget 256 --methods snapkv,tova]
# kvpress lives in an environment of its own, .venv-peers, because it needs older transformers and pandas. A few minutes
# on 2 cores. $PEERS_FOLDER keeps what both sides wrote; $KVBENCH_PYTHON runs kvbench from another environment.
set -euo pipefail
source "$(dirname "$0")/../common.sh"

for word in "$@"; do
    case $word in
        -h | --help) sed -n '2,5s/^# \?//p' scripts/peers/run.sh && exit ;;
    esac
done
if [ -n "${KVBENCH_PYTHON:-}" ]; then python=$KVBENCH_PYTHON; else set_up; fi
fetch

peers=.venv-peers
if [ ! -e "$peers/installed" ]; then
    rm -rf "$peers"
    "$("$python" -c 'import sys; print(sys.base_prefix)')/bin/python3" -m venv "$peers"
    # torch by itself and pinned: a range would let pip draw in a CUDA build of several GB.
    "$peers/bin/python" -m pip install --quiet "torch==2.13.0"
    "$peers/bin/python" -m pip install --quiet "kvpress==0.5.5" "transformers==5.2.0" "pandas==2.3.3"
    touch "$peers/installed"
fi

folder=${PEERS_FOLDER:-$(mktemp -d)}
[ -n "${PEERS_FOLDER:-}" ] || trap 'rm -rf "$folder"' EXIT
"$python" scripts/peers/kvbench_side.py prepare "$folder" "$@"
HF_HUB_OFFLINE=1 "$peers/bin/python" scripts/peers/kvpress_side.py "$folder"
"$python" scripts/peers/kvbench_side.py check "$folder"
"$python" scripts/peers/table.py "$folder" docs/peers.md
