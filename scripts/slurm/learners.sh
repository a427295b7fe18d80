#!/bin/bash
# Several nodes learn together: the first runs the agents and its part of the learner, the others the rest of the learner
# (docs/guides/cluster.md). The engine is where CONFIG has it: on GPUs of the first node, or at engine.options.url.
#
#     sbatch --nodes=2 scripts/slurm/learners.sh CONFIG train.processes=6 'train.devices=[1,2,3]' 'engine.devices=[0]' \
#         train.strategy=fsdp2 [KEY=VALUE]...
#
# train.processes are those of all nodes, as many on each: on the first those of train.devices, on the others their first
# GPUs. PORT is a free one of the first node (29400, if not given). The network between the nodes must be one that nobody
# else can reach; --exclusive keeps others away from the nodes themselves.
#
#SBATCH --job-name=crrl-learners
#SBATCH --nodes=2
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
on() { # on NODE COMMAND...: one task there
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" "${@:2}"
}

# as the others find it: to itself it may be 127.0.1.1
address=$(on "${nodes[1]}" getent ahostsv4 "${nodes[0]}" | { read -r first _ && cat >/dev/null && echo "$first"; })
rendezvous=$address:${PORT:-29400}
CRRL_RENDEZVOUS_KEY=$(openssl rand -hex 32)
export CRRL_RENDEZVOUS_KEY # srun hands it on

learn() { # learn NODE NUMBER: again when it fails or is killed; 0 is done, 2 and 3 are mistakes
    local status=1
    until [ "$status" = 0 ] || [ "$status" = 2 ] || [ "$status" = 3 ]; do
        status=0
        on "$1" "${crrl[@]}" learner "$rendezvous" --node "$2" --logs "logs/$SLURM_JOB_ID-$1" || status=$?
        sleep 1
    done
}
working=()
finish() {
    kill "${working[@]}" 2>/dev/null || true # they may have ended by themselves
}
trap finish EXIT
for ((number = 1; number < ${#nodes[@]}; number++)); do
    learn "${nodes[number]}" "$number" &
    working+=($!)
done

train "$@" train.nodes="${#nodes[@]}" train.rendezvous="$rendezvous"
