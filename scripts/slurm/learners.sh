#!/bin/bash
# Several nodes learn together: torchrun starts the learner's processes on all of them, the first also runs the agents
# (docs/guides/cluster.md). The engine is where CONFIG has it: on GPUs of the first node, or at engine.options.url.
#
#     sbatch --nodes=2 scripts/slurm/learners.sh CONFIG train.strategy=fsdp2 'engine.devices=[3]' [KEY=VALUE]...
#
# GPUS (3, if not given) are the learner's on each node, its first ones; train.processes follows from them. PORT is a free
# port of the first node (29500, if not given), and torchrun takes the next one. TORCHRUN is the torchrun of the same
# installation as CRRL (.venv/bin/torchrun, if not given). Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME where a node's
# name is not its address on the network between the nodes. That network must be one that nobody else can reach;
# --exclusive keeps others away from the nodes themselves.
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
read -ra torchrun <<<"${TORCHRUN:-.venv/bin/torchrun}"
mkdir -p weights logs
on() { # on NODE COMMAND...: one task there
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" "${@:2}"
}

# as the others find it: to itself it may be 127.0.1.1
address=$(on "${nodes[-1]}" getent ahostsv4 "${nodes[0]}" | { read -r first _ && cat >/dev/null && echo "$first"; })
port=${PORT:-29500}
listen=$address:$port
gpus=${GPUS:-3}
CRRL_LEARNER_SECRET=$(openssl rand -hex 32)
export CRRL_LEARNER_SECRET TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # srun hands them on

learn() { # learn NODE: again when torchrun fails or is killed
    until on "$1" "${torchrun[@]}" --nnodes="${#nodes[@]}" --nproc-per-node="$gpus" --max-restarts=100 \
        --rdzv-backend=c10d --rdzv-endpoint="$address:$((port + 1))" --rdzv-id="$SLURM_JOB_ID" \
        -m coderepairrl.learn.torchrun "$listen" >>"logs/learner-$SLURM_JOB_ID-$1.log" 2>&1; do
        sleep 1
    done
}
working=()
finish() {
    kill "${working[@]}" 2>/dev/null || true # they may have ended by themselves
}
trap finish EXIT
for node in "${nodes[@]}"; do
    learn "$node" &
    working+=($!)
done

train "$@" train.processes="$((gpus * ${#nodes[@]}))" train.listen="$listen" engine.weights_dir="$PWD/weights"
