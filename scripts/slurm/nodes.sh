#!/bin/bash
# Two nodes or more: the first trains and runs the agents, the others serve the policy with all their GPUs
# (docs/guides/cluster.md), as replicas of one vLLM server. For more of them: sbatch --nodes=N.
#
#     MODEL=/shared/models/Qwen3-14B VLLM_ARGS="--tensor-parallel-size 4 --enable-lora --max-lora-rank 32" \
#         sbatch --export=ALL scripts/slurm/nodes.sh CONFIG train.processes=4 train.devices=[0,1,2,3] [KEY=VALUE]...
#
# VLLM_PYTHON is the Python that has vLLM, PORT a free one of all nodes (.venv/bin/python and 8000, if not given), REPLICAS
# how many of the model each node serves (1). MODEL is on a file system of all nodes, and so is the folder from which this is submitted. The server's routes can run
# anything, so it listens on a socket of this user, which ssh brings to the first node; --exclusive keeps others away.
#
#SBATCH --job-name=crrl-nodes
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
read -ra python <<<"${VLLM_PYTHON:-.venv/bin/python}"
read -ra arguments <<<"${VLLM_ARGS:-}"
where='from coderepairrl.engines.vllm.server import EXTENSION; print(EXTENSION)'
extension=$("${python[@]}" -c "$where" 2>/dev/null || .venv/bin/python -c "$where") # vLLM may have a Python of its own
private=/tmp/crrl-$SLURM_JOB_ID # on the first serving node
port=${PORT:-8000}
mkdir -p weights logs
on() { # on NODE COMMAND...: one task there
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" "${@:2}"
}

running=()
finish() {
    kill "${running[@]}" 2>/dev/null || true # they may have ended by themselves
    on "$first" rm -rf "$private"
}
trap finish EXIT
alive() {
    for process in "${running[@]}"; do
        kill -0 "$process" # it ended: so does the job, and its log says why
    done
}

first=${nodes[1]} replicas=${REPLICAS:-1}
total=$(((${#nodes[@]} - 1) * replicas))
if [ "$total" -gt 1 ]; then # replicas on other nodes find the server at this port, inside the cluster
    address=$(on "$first" getent ahostsv4 "$first" | awk 'NR == 1 { print $1 }')
    arguments+=(--data-parallel-size "$total" --data-parallel-size-local "$replicas")
    arguments+=(--data-parallel-address "$address" --data-parallel-rpc-port "$port")
fi
serve() { # serve NODE LOG WORD...: what WORDs start, with the arguments that all replicas have
    on "$1" env VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 \
        PYTHONPATH="$extension" "${python[@]}" "${@:3}" \
        --model "$MODEL" --enable-scale-out --logprobs-mode processed_logprobs --generation-config vllm \
        --worker-extension-cls crrl_worker.Extension "${arguments[@]}" >>"$2" 2>&1 &
    running+=($!)
}
on "$first" rm -rf "$private"
on "$first" mkdir -m 700 "$private"
serve "$first" "logs/engine-$SLURM_JOB_ID.log" -m vllm.entrypoints.openai.api_server --uds "$private/socket"
for at in "${!nodes[@]}"; do
    [ "$at" -lt 2 ] || serve "${nodes[at]}" "logs/engine-$SLURM_JOB_ID-${nodes[at]}.log" \
        -m vllm.entrypoints.cli.main serve --headless --data-parallel-start-rank $(((at - 1) * replicas))
done
until on "$first" test -S "$private/socket"; do
    alive
    sleep 5
done
ssh -N -o BatchMode=yes -o ExitOnForwardFailure=yes -L "127.0.0.1:$port:$private/socket" "$first" &
running+=($!)
until curl --silent --fail --output /dev/null "http://127.0.0.1:$port/health"; do
    alive
    sleep 5
done

train "$@" model.path="$MODEL" engine=vllm engine.options.url="http://127.0.0.1:$port" engine.weights_dir="$PWD/weights"
