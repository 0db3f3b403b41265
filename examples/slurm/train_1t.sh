#!/bin/bash
# Train a GPT of 1 T parameters on 64 nodes of 8 GPUs: tensor parallelism inside each node, 16 pipeline
# stages across nodes, and ZeRO stage 1 over the 4 nodes of a stage.
#
#     sbatch examples/slurm/train_1t.sh
#
# The pipe axis is the outermost axis of the mesh, so 4 neighboring nodes are one stage, of 8 layers.
# Each stage sends one microbatch's activations to the next. 64 microbatches and 2 chunks of layers on
# each stage leave a bubble of 12 %. See train_gpt.sh for the script's requirements and its time limit.
#SBATCH --job-name=zerojax-gpt-1t
#SBATCH --nodes=64
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
  --preset 1t --precision bf16 --stage 1 --activations selective --sequence-parallel True \
  --mesh "pipe=16,fsdp=$((SLURM_NNODES / 16)),tensor=8" --pipe-chunks 2 \
  --batch-size "$((64 * SLURM_NNODES / 16))" --num-microbatches 64 \
  --data "${DATA:?set DATA to a folder of text files}" \
  --steps 20000 --learning-rate 1e-4 --eval-every 500 --sample-bytes 0 \
  --checkpoint-dir "${CHECKPOINTS:-runs/gpt-1t/checkpoints}" --checkpoint-every 500 \
  --resume True --logdir "runs/${SLURM_JOB_ID}" "$@"
