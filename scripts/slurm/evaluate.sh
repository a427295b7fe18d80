#!/bin/bash
# An array of evaluations, one for each line of a file: a policy, such as RUN/checkpoints/00010 (docs/guides/cluster.md).
#
#     sbatch --array=1-"$(wc -l <policies.txt)" scripts/slurm/evaluate.sh policies.txt CONFIG|SOURCE [KEY=VALUE]...
#
#SBATCH --job-name=crrl-evaluate
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=8:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=crrl-%A-%a.log
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
. scripts/slurm/resumable.sh

policy=$(sed -n "${SLURM_ARRAY_TASK_ID}p" "$1")
if [ -z "$policy" ]; then
    echo "$1 has no line $SLURM_ARRAY_TASK_ID" >&2
    exit 2
fi
shift
run=runs/evaluate-$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID
resumable "$run" eval "$@" --policy "$policy" -o "$run"
