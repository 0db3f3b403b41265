#!/bin/bash
# Train a GPT of 22 B parameters on 2 nodes of 8 GPUs: tensor parallelism inside each node, ZeRO stage
# 3 across nodes.
#
#     sbatch examples/slurm/train_gpt_tensor.sh
#
# The tensor axis is the innermost axis of the mesh, so the 8 GPUs of a node share each layer and
# exchange its activations over their own links. The activations are also split over these GPUs, along
# the sequence. Each GPU's part of the parameters, gradients and optimizer state is split again over
# the nodes. See train_gpt.sh for the script's requirements and its time limit.
#SBATCH --job-name=zerojax-gpt-tensor
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
  --preset 22b --precision bf16 --activations selective --sequence-parallel True \
  --mesh "fsdp=${SLURM_NNODES},tensor=8" \
  --batch-size "$((4 * SLURM_NNODES))" --num-microbatches 1 \
  --data "${DATA:?set DATA to a folder of text files}" \
  --steps 20000 --learning-rate 2e-4 --eval-every 500 --sample-bytes 0 \
  --checkpoint-dir "${CHECKPOINTS:-runs/gpt-22b/checkpoints}" --checkpoint-every 500 --resume True \
  --logdir "runs/${SLURM_JOB_ID}" "$@"
