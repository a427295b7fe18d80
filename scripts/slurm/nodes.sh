#!/bin/bash
# Two nodes: the first trains and runs the agents, the second serves the policy with all its GPUs (docs/guides/cluster.md).
#
#     MODEL=/shared/models/Qwen3-14B VLLM_ARGS="--tensor-parallel-size 4 --enable-lora --max-lora-rank 32" \
#         sbatch --export=ALL scripts/slurm/nodes.sh CONFIG train.processes=4 train.devices=[0,1,2,3] [KEY=VALUE]...
#
# VLLM_PYTHON is the Python that has vLLM, PORT a free one of the first node (.venv/bin/python and 8000, if not given).
# MODEL is on a file system of both nodes, and so is the folder from which this is submitted. The server's routes can run
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
serving=${nodes[1]}
read -ra python <<<"${VLLM_PYTHON:-.venv/bin/python}"
read -ra arguments <<<"${VLLM_ARGS:-}"
where='from coderepairrl.engines.vllm.server import EXTENSION; print(EXTENSION)'
extension=$("${python[@]}" -c "$where" 2>/dev/null || .venv/bin/python -c "$where") # vLLM may have a Python of its own
private=/tmp/crrl-$SLURM_JOB_ID # on the serving node
port=${PORT:-8000}
mkdir -p weights logs
there=(srun --overlap --nodes=1 --ntasks=1 --nodelist="$serving")

"${there[@]}" rm -rf "$private"
"${there[@]}" mkdir -m 700 "$private"
"${there[@]}" env VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 \
    PYTHONPATH="$extension" "${python[@]}" -m vllm.entrypoints.openai.api_server --uds "$private/socket" \
    --model "$MODEL" --enable-scale-out --logprobs-mode processed_logprobs --generation-config vllm \
    --worker-extension-cls crrl_worker.Extension "${arguments[@]}" >>"logs/engine-$SLURM_JOB_ID.log" 2>&1 &
server=$!
finish() {
    kill "$server" "${tunnel:-$server}" 2>/dev/null || true # they may have ended by themselves
    "${there[@]}" rm -rf "$private"
}
trap finish EXIT

until "${there[@]}" test -S "$private/socket"; do
    kill -0 "$server" # it ended: so does the job, and its log says why
    sleep 5
done
ssh -N -o BatchMode=yes -o ExitOnForwardFailure=yes -L "127.0.0.1:$port:$private/socket" "$serving" &
tunnel=$!
until curl --silent --fail --output /dev/null "http://127.0.0.1:$port/health"; do
    kill -0 "$server"
    kill -0 "$tunnel"
    sleep 5
done

train "$@" model.path="$MODEL" engine=vllm engine.options.url="http://127.0.0.1:$port" engine.weights_dir="$PWD/weights"
