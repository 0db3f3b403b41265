#!/bin/bash
# Train a GPT on 2 nodes of 8 GPUs: ZeRO stage 3 inside a node, replicas across nodes (hybrid sharding).
#
#     sbatch examples/slurm/train_gpt.sh
#
# One task a node; each drives all of its node's GPUs. JAX finds the coordinator and the tasks in Slurm's environment.
# The text, the checkpoints and the virtual environment lie on a file system that every node sees. Ten minutes before its time is
# up the run saves and ends; submitted again, it goes on from there. Runs of other options need CHECKPOINTS of their own.
#SBATCH --job-name=zerojax-gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@600
#SBATCH --output=%x-%j.log

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit from the root of the repository}"
source "${VENV:-.venv}/bin/activate" # made with: pip install -e '.[examples,cuda]'

srun python examples/train_gpt.py \
  --preset 6.7b --precision bf16 --activations remat \
  --mesh "data=${SLURM_NNODES},fsdp=8" \
  --batch-size "$((16 * SLURM_NNODES))" --num-microbatches 1 \
  --data "${DATA:?set DATA to a folder of text files}" \
  --steps 20000 --learning-rate 3e-4 --eval-every 500 \
  --checkpoint-dir "${CHECKPOINTS:-runs/gpt-6.7b/checkpoints}" --checkpoint-every 500 --resume True \
  --logdir "runs/${SLURM_JOB_ID}" "$@"
