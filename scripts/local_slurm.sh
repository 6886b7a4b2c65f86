#!/usr/bin/env bash
# A real Slurm on this machine, for tests and for trying a sweep at home. Needs root, Debian's slurm-wlm and munge.
#   bash scripts/local_slurm.sh start [NODES]      1 (default) or 2 nodes, all on this machine
#   bash scripts/local_slurm.sh stop
# Leaves an existing Slurm alone: its own files are in KVBENCH_SLURM (default /var/tmp/kvbench-slurm).
set -euo pipefail

home=${KVBENCH_SLURM:-/var/tmp/kvbench-slurm}
export SLURM_CONF=$home/slurm.conf

stop() {
    printf '%s\n' "$1" >&2
    exit 2
}

need() {
    [ "$(id -u)" = 0 ] || stop "a local Slurm needs root: sudo bash scripts/local_slurm.sh $1"
    for program in slurmctld slurmd munged scontrol; do
        command -v "$program" >/dev/null ||
            stop "$program is not installed: sudo apt-get install --no-install-recommends slurm-wlm munge"
    done
}

# Each daemon writes its pid into a file under $home that begins with its name: slurmd.node1.pid. A file may be left over
# from a daemon that is gone, and its pid belong to another process since: only a process of that name is stopped.
kill_ours() {
    local file pid name
    for file in "$home"/*.pid; do
        [ -e "$file" ] || continue
        pid=$(tr -dc 0-9 <"$file")
        name=$(basename "$file")
        name=${name%%.*}
        if is_running "$pid" "$name"; then
            kill "$pid" 2>/dev/null || true
            for _ in $(seq 50); do
                is_running "$pid" "$name" || break
                sleep 0.1
            done
            if is_running "$pid" "$name"; then kill -9 "$pid" 2>/dev/null || true; fi
        fi
        rm -f "$file"
    done
}

# is_running PID NAME: whether a process with this pid and this program's name runs; a zombie does not.
is_running() {
    [ -n "$1" ] && [ -e "/proc/$1/exe" ] && ! grep -q '^State:.Z' "/proc/$1/status" 2>/dev/null || return 1
    [ "$(cat "/proc/$1/comm" 2>/dev/null)" = "$2" ] || [ "$(basename "$(readlink "/proc/$1/exe")")" = "$2" ]
}

start_munge() {
    local user=munge
    id "$user" >/dev/null 2>&1 || user=root
    mkdir -p "$home/munge"
    [ -e "$home/munge/key" ] || dd if=/dev/urandom of="$home/munge/key" bs=1024 count=1 status=none
    chown -R "$user" "$home/munge"
    chmod 755 "$home/munge"
    chmod 400 "$home/munge/key"
    local command="munged --force --key-file=$home/munge/key --socket=$home/munge/socket \
        --pid-file=$home/munge/pid --log-file=$home/munge/log --seed-file=$home/munge/seed"
    if [ "$user" = root ]; then $command; else su -s /bin/sh "$user" -c "$command"; fi
    cp "$home/munge/pid" "$home/munged.pid"
}

write_config() {
    local nodes=$1 host cpus memory i
    host=$(hostname -s)
    cpus=$(nproc)
    memory=$(awk '/MemTotal/ { printf "%d", $2 / 1024 * 0.9 }' /proc/meminfo)
    {
        cat <<CONF
ClusterName=kvbench
SlurmctldHost=$host
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$home/munge/socket
CredType=cred/munge
StateSaveLocation=$home/state
SlurmdSpoolDir=$home/spool.%n
SlurmctldPidFile=$home/slurmctld.pid
SlurmdPidFile=$home/slurmd.%n.pid
SlurmctldLogFile=$home/slurmctld.log
SlurmdLogFile=$home/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0
KillWait=5
MpiDefault=none
CONF
        # Each node believes in all the cores: what is tried here is the scheduling, not the speed.
        for i in $(seq "$nodes"); do
            echo "NodeName=node$i NodeHostname=$host NodeAddr=127.0.0.1 Port=$((16900 + i)) CPUs=$cpus RealMemory=$memory"
        done
        echo "PartitionName=local Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES"
    } >"$SLURM_CONF"
}

start() {
    local nodes=${1:-1} i
    need start
    kill_ours
    rm -rf "$home"
    mkdir -p "$home/state"
    chmod 755 "$home"
    write_config "$nodes"
    start_munge
    slurmctld -f "$SLURM_CONF"
    for i in $(seq "$nodes"); do
        mkdir -p "$home/spool.node$i"
        slurmd -f "$SLURM_CONF" -N "node$i"
    done
    for _ in $(seq 60); do
        if [ "$(sinfo -h -t idle -o %D 2>/dev/null)" = "$nodes" ]; then
            echo "Slurm runs with $nodes node(s). In this shell: export SLURM_CONF=$SLURM_CONF"
            echo "Then: python -m kvbench -m method=full,kivi4,h2o budget=256,1000 hydra/launcher=slurm"
            return
        fi
        sleep 0.5
    done
    tail -5 "$home"/*.log >&2
    kill_ours
    stop "the nodes did not come up; the logs are in $home"
}

case ${1:-} in
start) start "${2:-1}" ;;
stop)
    need stop
    kill_ours
    echo "Slurm is stopped; its logs are in $home"
    ;;
*) stop "type: bash scripts/local_slurm.sh start [NODES], or stop" ;;
esac
