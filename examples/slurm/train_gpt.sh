#!/bin/bash
# Train a GPT on 2 nodes of 8 GPUs: ZeRO stage 3 inside each node, replicas across nodes.
#
#     sbatch examples/slurm/train_gpt.sh
#
# Each node runs one task, which drives all GPUs of the node. zerojax finds the coordinator and the
# tasks in Slurm's environment. The text, the checkpoints and the virtual environment must be on a
# file system that every node can read. Ten minutes before the time limit the run saves and ends; if
# you submit it again, it continues from there. A run with other options needs its own CHECKPOINTS.
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
