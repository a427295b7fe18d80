#!/bin/bash
# Two nodes or more: the first trains and runs the agents, each of the others serves the policy with all its GPUs
# (docs/guides/cluster.md). For more servers: sbatch --nodes=N.
#
#     MODEL=/shared/models/Qwen3-14B VLLM_ARGS="--tensor-parallel-size 4 --enable-lora --max-lora-rank 32" \
#         sbatch --export=ALL scripts/slurm/nodes.sh CONFIG train.processes=4 train.devices=[0,1,2,3] [KEY=VALUE]...
#
# VLLM_PYTHON is the Python that has vLLM, PORT a free one of the first node (.venv/bin/python and 8000, if not given; more
# servers take the next ones). MODEL is on a file system of all nodes, and so is the folder from which this is submitted. The server's routes can run
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
private=/tmp/crrl-$SLURM_JOB_ID # on the serving nodes
port=${PORT:-8000}
mkdir -p weights logs
on() { # on NODE COMMAND...: one task there
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" "${@:2}"
}

running=()
finish() {
    kill "${running[@]}" 2>/dev/null || true # they may have ended by themselves
    for node in "${nodes[@]:1}"; do
        on "$node" rm -rf "$private"
    done
}
trap finish EXIT
alive() {
    for process in "${running[@]}"; do
        kill -0 "$process" # it ended: so does the job, and its log says why
    done
}

urls=()
for node in "${nodes[@]:1}"; do
    log=logs/engine-$SLURM_JOB_ID.log
    [ "$node" = "${nodes[1]}" ] || log=logs/engine-$SLURM_JOB_ID-$node.log
    on "$node" rm -rf "$private"
    on "$node" mkdir -m 700 "$private"
    on "$node" env VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 \
        PYTHONPATH="$extension" "${python[@]}" -m vllm.entrypoints.openai.api_server --uds "$private/socket" \
        --model "$MODEL" --enable-scale-out --logprobs-mode processed_logprobs --generation-config vllm \
        --worker-extension-cls crrl_worker.Extension "${arguments[@]}" >>"$log" 2>&1 &
    running+=($!)
    urls+=("http://127.0.0.1:$((port + ${#urls[@]}))")
done
for at in "${!urls[@]}"; do
    node=${nodes[at + 1]}
    until on "$node" test -S "$private/socket"; do
        alive
        sleep 5
    done
    ssh -N -o BatchMode=yes -o ExitOnForwardFailure=yes -L "${urls[at]#http://}:$private/socket" "$node" &
    running+=($!)
    until curl --silent --fail --output /dev/null "${urls[at]}/health"; do
        alive
        sleep 5
    done
done

url=${urls[0]}
if [ "${#urls[@]}" -gt 1 ]; then
    url=$(printf ',"%s"' "${urls[@]}")
    url="[${url#,}]"
fi
train "$@" model.path="$MODEL" engine=vllm engine.options.url="$url" engine.weights_dir="$PWD/weights"
