#!/usr/bin/env bash
# Sweeps through a real Slurm: installs it where it is missing (as root), starts it, runs the tests, stops it.
set -euo pipefail
source "$(dirname "$0")/common.sh"

set_up test,sweep
export OMP_NUM_THREADS=1

if ! command -v slurmctld >/dev/null || ! command -v munged >/dev/null; then
    [ "$(id -u)" = 0 ] || stop "Slurm is not installed: sudo apt-get install --no-install-recommends slurm-wlm munge"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null
fi
KVBENCH_SLURM=$(mktemp -d /var/tmp/kvbench-slurm.XXXXXX)
export KVBENCH_SLURM
trap 'bash scripts/local_slurm.sh stop && rm -rf "$KVBENCH_SLURM"' EXIT
bash scripts/local_slurm.sh start 2
export SLURM_CONF=$KVBENCH_SLURM/slurm.conf
"$python" -m pytest -m slurm tests/slurm "$@"
