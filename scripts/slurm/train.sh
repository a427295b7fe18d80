#!/bin/bash
# One node: gateway, engine, learner and agents' workers, started by one command (docs/guides/cluster.md).
#
#     sbatch scripts/slurm/train.sh CONFIG engine.devices=[0] train.devices=[1,2] train.processes=2 [KEY=VALUE]...
#
#SBATCH --job-name=crrl-train
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=3
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=crrl-%j.log
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
. scripts/slurm/resumable.sh

train "$@"
