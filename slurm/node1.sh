#!/usr/bin/env bash
# Machine 1 of two jobs that train together: sbatch slurm/node0.sh; sbatch slurm/node1.sh
# For those who know it so from an article. ddp_torchrun_nodes.sh is one job for both machines, and
# better: Slurm starts its nodes together, on any that are free. These two wait for one another.
# Submit both, with the same flags. They end at their time limit: submit both again to continue.
#SBATCH --job-name=node1 --output=%x-%j.out --no-requeue # which starts one alone
#SBATCH --nodelist=node1 --ntasks=1 # EDIT: this machine. One process, which starts one per GPU
#SBATCH --gres=gpu:4              # EDIT: GPUs; if sinfo -o %G shows none, delete this line
#SBATCH --cpus-per-task=16        # EDIT: CPUs: 4 per GPU, one for each of its --workers
#SBATCH --mem=64G                 # EDIT: memory; 0: all of it
#SBATCH --time=04:00:00           # EDIT: time limit
##SBATCH --partition=gpu          # EDIT: delete one # if you need it; likewise --account, --qos

source .venv/bin/activate || exit # EDIT: your environment: this line, or the next
# module load conda; eval "$(conda shell.bash hook)"; conda deactivate; conda activate NAME || exit

# srun would use those of a job in which sbatch was called.
unset SLURM_GPUS_PER_NODE SLURM_GPUS_PER_SOCKET SLURM_GPUS_PER_TASK
# Without a GPU that torch can use, it would train on the CPU.
check="import torch; assert torch.accelerator.is_available(), 'torch can use no GPU'"
srun --export=ALL python -c "$check" || exit
# EDIT, as in node0.sh: machine 0 and a free port, and a folder on a disk that both machines share.
# Without a port: --init-method file:///shared/NEW_FILE. --timeout: minutes to wait for the other
# machine, and later for another rank: if one hangs, all wait for so long.
srun --export=ALL --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    python -u train_ddp_spawn.py --init-method tcp://node0:23456 --timeout 240 \
    --nnodes 2 --node-rank 1 --output runs/pair --resume "$@"
