#!/bin/bash
# Several nodes: the first has the run (learner, engine, log) with its GPUs, the others make its episodes as a Ray cluster
# (docs/guides/cluster.md).
#
#     sbatch --nodes=5 scripts/slurm/ray.sh CONFIG [KEY=VALUE]...
#
# RAY is the command (.venv/bin/ray, if not given), PORT a free port of the first node (6379), HEAD_CPUS how many CPUs of
# the first node are for episodes, too (0). The folder from which this is submitted is on a file system of all nodes.
# Episodes use no GPU, and the lines below ask for the same on all nodes: where yours have them to spare or none at all, make
# it a heterogeneous job (a line `#SBATCH hetjob` and a second block without --gpus-per-node), add the names in
# SLURM_JOB_NODELIST_HET_GROUP_1 to `nodes`, and --het-group=1 to the srun of those. That is untested.
# Whoever can talk to Ray can run anything as you: it asks for a token, which only this job's environment has; --exclusive
# keeps others away.
#
#SBATCH --job-name=crrl-ray
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=crrl-%j.log
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
. scripts/slurm/resumable.sh

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
read -ra ray <<<"${RAY:-.venv/bin/ray}"
port=${PORT:-6379}
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0
export RAY_memory_monitor_refresh_ms=0 # it would end actors, with all their episodes, where the kernel ends one sandbox
RAY_AUTH_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
mkdir -p logs
log=logs/ray-$SLURM_JOB_ID.log

started=()
begin() { # begin NODE WORD...: Ray on one node, for as long as the job lasts
    local node=$1
    shift
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" "${ray[@]}" start "$@" --num-gpus=0 --disable-usage-stats \
        --block >>"$log" 2>&1 &
    started+=($!)
}
finish() {
    kill "${started[@]}" 2>/dev/null || true # they may have ended by themselves
}
trap finish EXIT

begin "$head" --head --port="$port" --num-cpus="${HEAD_CPUS:-0}" --include-dashboard=false
until srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" "${ray[@]}" health-check --address "$head:$port" \
    >>"$log" 2>&1; do
    kill -0 "${started[0]}" # it ended: so does the job, and its log says why
    sleep 5
done
for node in "${nodes[@]:1}"; do
    begin "$node" --address="$head:$port"
done

train "$@" rollout.executor=ray "rollout.ray.address=$head:$port"
