#!/usr/bin/env bash
# Everything that one NVIDIA GPU can tell, in at most 10 minutes and without a network:
#
#   bash scripts/gpu_reference.sh [WHEELS]      # WHEELS: a folder with wheels of what this Python lacks
#   bash scripts/gpu_reference.sh --dry-run     # the same stages, tiny, on the CPU: to see that they run
#
# It checks the kernels and the captured steps against the reference, times kernels and decoding, measures quality with
# the offline model where that was fetched, and packs what it wrote into one archive under results/h200/. Each stage has
# its time; one that fails or runs out of it costs no other. $PYTHON is the interpreter (python3).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

dry= wheels=${WHEELS:-}
for word in "$@"; do
    case $word in
    --dry-run) dry=1 ;;
    -*) printf '%s is unknown; type bash scripts/gpu_reference.sh [--dry-run] [WHEELS]\n' "$word" >&2 && exit 2 ;;
    *) wheels=$word ;;
    esac
done
python=${PYTHON:-python3}
if [ -n "$wheels" ] && [ ! -d "$wheels" ]; then
    printf 'there is no folder %s; give the one with the wheels\n' "$wheels" >&2 && exit 2
fi

name=gpu_reference-$(date -u +%Y%m%d-%H%M%S)
out=${OUT:-results/h200}
folder=$out/$name
mkdir -p "$folder" || exit 2
say() { printf '%s\n' "$*" | tee -a "$folder/summary.txt"; }

export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
if [ -n "$wheels" ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --find-links "$wheels" --target "$site" \
        hydra-core omegaconf antlr4-python3-runtime datasets gguf >"$folder/pip.log" 2>&1 ||
        say "the wheels in $wheels were not installed: $(tail -1 "$folder/pip.log")"
    PYTHONPATH=$PYTHONPATH:$site
fi

device=(--device cuda)
[ -n "$dry" ] && device=(--device cpu --tiny)
failed=0

# stage NAME SECONDS COMMAND...: its output to the terminal and to NAME.log; returns its exit status, 124 for a timeout.
stage() {
    local label=$1 limit=$2 status started=$SECONDS
    shift 2
    [ -n "$dry" ] && limit=$((5 * limit)) # a busy CPU is no failure
    printf '\n== %s (at most %s s)\n' "$label" "$limit"
    timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$folder/$label.log"
    status=${PIPESTATUS[0]}
    case $status in
    0) say "$label: done in $((SECONDS - started)) s" ;;
    124 | 137) say "$label: stopped after $limit s; what it had written stays" ;;
    *) say "$label: FAILED with status $status: $(grep -v '^$' "$folder/$label.log" | tail -1 | cut -c 1-160)" ;;
    esac
    [ "$status" -eq 0 ] || failed=1
    return "$status"
}

say "$(date -u +%FT%TZ) $(git rev-parse --short HEAD 2>/dev/null || echo 'no git')${dry:+ DRY RUN on the CPU}"
stage machine 20 bash -c 'nvidia-smi 2>/dev/null; "$0" -c "
import importlib.metadata as m, platform
print(platform.platform(), platform.python_version())
for name in (\"torch\", \"triton\", \"transformers\", \"hydra-core\", \"omegaconf\", \"datasets\", \"gguf\", \"numpy\"):
    try: print(name, m.version(name))
    except m.PackageNotFoundError: print(name, \"is missing\")
import torch, kvbench.cache.graph
print(torch.cuda.get_device_name() if torch.cuda.is_available() else \"no CUDA device\")"' "$python"

# The Triton kernels are trusted for what follows only where every variant agrees with the reference.
stage check_triton 120 "$python" scripts/check_triton.py
status=$?
if [ "$status" -ne 0 ] && ! { [ "$status" -eq 124 ] && ! grep -q 'too large' "$folder/check_triton.log"; }; then
    say "THE TRITON KERNELS DID NOT PASS: everything below runs on the reference kernel"
    export KVBENCH_KERNEL=reference
fi
stage check_graph 90 "$python" scripts/check_graph.py "${device[@]}" --out "$folder/check_graph.json"
stage kernels 120 "$python" scripts/gpu_kernels.py "${device[@]}" --out "$folder/kernels.json"
stage decode 160 "$python" scripts/gpu_decode.py "${device[@]}" --seconds 110 --out "$folder/decode.json"

if "$python" -c 'from kvbench.fetch import fetched_folder as f; f("model", "smollm2-135m"), f("text", "essays")' \
    >/dev/null 2>&1; then
    words=(experiment=first_light "measure=[perplexity,needle,memory,latency]")
    [ -n "$dry" ] && words=(method=h2o budget=32 model=random-tiny data=random "measure=[perplexity,latency]"
        perplexity.context=64 perplexity.tokens=8 perplexity.windows=1 "latency.contexts=[64]" latency.steps=4)
    stage quality 80 "$python" -m kvbench "${words[@]}" results_dir="$folder/runs"
else
    say "quality: left out, the offline model was not fetched (python -m kvbench.fetch smollm2-135m essays)"
fi

tar -czf "$out/$name.tar.gz" -C "$out" "$name" && rm -rf "$folder" || failed=1
printf '\n'
tar -xzOf "$out/$name.tar.gz" "$name/summary.txt"
printf '\npacked: %s\n' "$out/$name.tar.gz"
exit "$failed"
