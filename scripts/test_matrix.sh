#!/usr/bin/env bash
# What needs another environment: docs, Slurm, old versions. Run after scripts/test.sh, whose .venv it uses.
set -euo pipefail
source "$(dirname "$0")/common.sh"

set_up test
fetch
export OMP_NUM_THREADS=1

echo "--- the documentation, without a warning"
set_up docs
"$python" -m pytest tests/docs/test_site.py
"$python" -m mkdocs build --strict --quiet

if [ "${KVBENCH_NIGHTLY:-0}" = 1 ]; then
    echo "--- tasks of lm-evaluation-harness"
    set_up lm_eval
    "$python" -m pytest tests/harness/test_harness.py
fi

echo "--- sweeps through a real Slurm"
bash scripts/test_slurm.sh

echo "--- the engine and the GPU kernels against the oldest supported transformers and Triton"
oldest=5.17.0
oldest_triton=3.6.0
aside=.venv-$oldest
wanted="$(fingerprint) $oldest $oldest_triton"
if [ "$(cat "$aside/installed" 2>/dev/null)" != "$wanted" ]; then
    rm -rf "$aside"
    "$python" -m venv "$aside"
    # Sees all of .venv behind its own packages, so that pip brings only what differs.
    "$aside/bin/python" - "$PWD/.venv" <<'PYTHON'
import site
import sys
import sysconfig
from pathlib import Path

own = Path(sysconfig.get_path("purelib"))
behind = own.as_posix().replace(sys.prefix, sys.argv[1], 1)
(own / "behind.pth").write_text(f"import site; site.addsitedir({behind!r})\n")
PYTHON
    "$aside/bin/python" -m pip install --quiet "transformers==$oldest"
    "$aside/bin/python" -m pip install --quiet --no-deps "triton==$oldest_triton"
    printf '%s\n' "$wanted" >"$aside/installed"
fi
"$aside/bin/python" -c "import transformers; assert transformers.__version__ == '$oldest', transformers.__file__"
"$aside/bin/python" -c "import triton; assert triton.__version__ == '$oldest_triton', triton.__file__"
"$aside/bin/python" -m pytest tests/kernels/test_triton.py
exec "$aside/bin/python" -m pytest -n 2 --dist loadfile -m "engine and not slow"
