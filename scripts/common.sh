# Shared set-up of quickstart.sh and test.sh; sourced, not run. Leaves the shell in the checkout, with $python set.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python

stop() {
    printf '%s\n' "$1" >&2
    exit 2
}

# The first interpreter of a supported version; $PYTHON, if set, is tried alone.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            printf '%s' "$candidate"
            return
        fi
    done
    stop "kvbench needs Python 3.11, 3.12 or 3.13 and found none: sudo apt-get install python3 python3-venv"
}

has_nvidia_gpu() {
    command -v nvidia-smi >/dev/null && [ -n "$(timeout 20 nvidia-smi -L 2>/dev/null)" ]
}

make_venv() {
    local base
    base=$(find_python)
    "$base" -c 'import ensurepip, venv' 2>/dev/null ||
        stop "this Python cannot make a virtual environment: sudo apt-get install $("$base" -c 'import sys
print("python%d.%d-venv" % sys.version_info[:2])')"
    rm -rf .venv
    "$base" -m venv .venv
}

# What the installation depends on: where it is, which Python, what pyproject.toml asks for.
fingerprint() {
    { pwd && "$python" -V && cat pyproject.toml; } | sha256sum | cut -d ' ' -f 1
}

# set_up [EXTRA]: .venv with kvbench (and the extra) in it. A stamp a level tells the next call that it is done.
set_up() {
    local stamp=.venv/installed-${1:-base}
    if [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint 2>/dev/null)" ]; then
        return
    fi
    "$python" -m pip --version >/dev/null 2>&1 || make_venv
    # By itself and pinned where there is no GPU: a version range would let pip draw in a CUDA build of several GB.
    has_nvidia_gpu || "$python" -m pip install "torch==2.13.0"
    "$python" -m pip install --editable ".${1:+[$1]}"
    fingerprint | tee .venv/installed-base >"$stamp"
}

fetch() {
    "$python" -m kvbench.fetch smollm2-135m essays
}
