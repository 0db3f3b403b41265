#!/bin/bash
# Train a GPT of 6.7 B parameters on sequences of 262,144 tokens, on 8 nodes of 8 GPUs: each sequence
# is split over 16 GPUs, and ZeRO stage 3 shards the state over all of them.
#
#     sbatch examples/slurm/train_long_context.sh
#
# The context axis is the innermost one, so the GPUs of two neighboring nodes share a sequence, and
# each has 16,384 of its tokens. In each layer, keys and values go around these GPUs in 15 turns, while
# each GPU attends to the keys that it has. More nodes train more sequences per step. A sequence is
# 262,144 bytes in a row, so DATA should have long texts. See train_gpt.sh for the script's
# requirements and its time limit.
#SBATCH --job-name=zerojax-gpt-long
#SBATCH --nodes=8
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
  --preset 6.7b --precision bf16 --activations selective \
  --seq 262144 --attention ring --mesh "fsdp=$((SLURM_NNODES / 2)),context=16" \
  --batch-size "$((SLURM_NNODES / 2))" --num-microbatches 1 \
  --data "${DATA:?set DATA to a folder of text files}" \
  --steps 20000 --learning-rate 3e-4 --eval-every 500 --sample-bytes 0 \
  --checkpoint-dir "${CHECKPOINTS:-runs/gpt-6.7b-long/checkpoints}" --checkpoint-every 500 \
  --resume True --logdir "runs/${SLURM_JOB_ID}" "$@"
