#!/usr/bin/env bash
# Machine 1 of two jobs that train together: sbatch slurm/node0.sh; sbatch slurm/node1.sh
# Submit both, in either order, with the same flags. They end at their time limit: submit both
# again to continue.
#SBATCH --job-name=node1
#SBATCH --nodelist=node1          # EDIT: the name of this machine
#SBATCH --ntasks=1                # one process, which starts one per GPU
#SBATCH --gres=gpu:4              # EDIT: GPUs; if sinfo -o %G shows none, delete this line
#SBATCH --cpus-per-task=16        # EDIT: CPUs, in proportion to the GPUs
##SBATCH --mem=64G                # EDIT: memory; delete one # if your cluster needs it
#SBATCH --time=04:00:00           # EDIT: time limit
##SBATCH --partition=gpu          # EDIT: delete one # if you need it; likewise --account, --qos
#SBATCH --output=%x-%j.out

source .venv/bin/activate || exit # EDIT: your environment
# EDIT, as in node0.sh: machine 0 and a free port, and a folder on a disk that both machines share.
# In a container, write singularity exec --nv --bind /home/shared IMAGE.sif before python.
srun --export=ALL --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    python -u train_ddp_spawn.py --init-method tcp://node0:23456 --world-size 2 --rank 1 \
    --output runs/pair --resume "$@"
