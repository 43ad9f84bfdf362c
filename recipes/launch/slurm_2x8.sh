#!/bin/bash
# Slurm: data parallel on two nodes of 8 GPUs (LoRA and QLoRA). torchrun starts one process for each GPU.
#   sbatch recipes/launch/slurm_2x8.sh recipes/RECIPE.yaml
# Without Slurm, run the last command on every node, with its own --node_rank and the first node's --master_addr:
#   torchrun --nnodes 2 --nproc_per_node 8 --node_rank 0 --master_addr 10.0.0.1 -m trl_packfa train --config RECIPE.yaml
# Nodes may have an output folder of their own. A run resumes on the same nodes, from the first node's checkpoint.
#SBATCH --job-name=trl-packfa
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc_per_node 8 --rdzv_backend c10d --rdzv_id "$SLURM_JOB_ID" \
  --rdzv_endpoint "$first:29500" -m trl_packfa train --config "$@"
