#!/bin/bash
# An array of evaluations, one for each line of a file: a model's folder, such as RUN/checkpoints/00010 (docs/guides/cluster.md).
#
#     sbatch --array=1-"$(wc -l <models.txt)" scripts/slurm/evaluate.sh models.txt CONFIG [KEY=VALUE]...
#
#SBATCH --job-name=crrl-evaluate
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=16
#SBATCH --time=8:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=crrl-%A-%a.log
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
. scripts/slurm/resumable.sh

model=$(sed -n "${SLURM_ARRAY_TASK_ID}p" "$1")
if [ -z "$model" ]; then
    echo "$1 has no line $SLURM_ARRAY_TASK_ID" >&2
    exit 2
fi
shift
train "$@" model.path="$model" run.steps=0 run.name="evaluate-$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID"
