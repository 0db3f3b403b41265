#!/bin/bash
# Fine-tune all weights of an 8 B model on 2 nodes of 8 GPUs: ZeRO stage 3 inside each node, replicas
# across nodes.
#
#     MODEL=/models/Llama-3.1-8B DATA=chats.jsonl sbatch examples/slurm/finetune.sh
#     MODEL=... DATA=... sbatch --nodes=1 examples/slurm/finetune.sh --lora-rank 16      # adapters, on one node
#
# Each node runs one task, which drives all GPUs of the node. The model, the data, the checkpoints and
# the virtual environment must be on a file system that every node can read. Ten minutes before the
# time limit the run saves, ends, and is queued again to continue. A run with other options needs its
# own CHECKPOINTS. EXPORT names a folder that is written at the end.
#SBATCH --job-name=zerojax-finetune
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit from the root of the repository}"
source "${VENV:-.venv}/bin/activate" # made with: pip install -e '.[examples,hf,cuda]'

status=0
srun python examples/finetune.py \
  --model "${MODEL:?set MODEL to a folder of the model}" --data "${DATA:?set DATA to a file of examples}" \
  --mesh "data=${SLURM_NNODES},fsdp=8" --batch-size "$((32 * SLURM_NNODES))" --seq 4096 --epochs 3 \
  --checkpoint-dir "${CHECKPOINTS:-runs/finetune/checkpoints}" --resume True --stopped-status 75 \
  --logdir "${LOGDIR:-runs/finetune}" ${EXPORT:+--export "$EXPORT"} "$@" || status=$?

# 75: a signal ended the run, which is saved.
if ((status == 75)); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
