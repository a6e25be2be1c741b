#!/usr/bin/env bash
# Trains on one node beyond the time limit: sbatch slurm/chain.sh [flags of your script]
# For those who look at their job's log every day; complete.sh needs them less. Your script must
# continue from the checkpoint in --output, if any, and save one several times within the limit.
##SBATCH --account=NAME --partition=gpu # EDIT: delete one # if you need them; or --qos
#SBATCH --gres=gpu:4                    # EDIT: GPUs; if sinfo -o %G has none, delete this
#SBATCH --cpus-per-task=16 --mem=64G    # EDIT: CPUs and memory
#SBATCH --time=04:00:00                 # EDIT: time limit of each life
#SBATCH --signal=B:USR1@300             # 300 s before it, bash gets the signal USR1
#SBATCH --job-name=chain --output=%x-%j.out --open-mode=append --requeue

source .venv/bin/activate || exit # EDIT: your environment: this line, or the next
# module load conda; eval "$(conda shell.bash hook)"; conda deactivate; conda activate NAME || exit
script=complete/train.py  # EDIT
checkpoint=checkpoint.pt  # EDIT: its name in --output
lives=15                  # EDIT: at most so many starts: 15 x 4 h x 4 GPUs = 240 GPU hours
folder=runs/$SLURM_JOB_ID # EDIT: or that of an old job, to continue it

if scontrol show job "$SLURM_JOB_ID" | grep -q ArrayTaskId=; then
    echo "chain.sh: an array's last task would requeue all of them: use complete.sh"
    exit 2
fi
if [[ " $* " == *" --output "* || " $* " == *" --output="* ]]; then
    echo "chain.sh: edit folder= instead of --output"
    exit 2
fi

when_saved() {
    # An empty file only reserves the folder.
    [ -s "$folder/$checkpoint" ] && stat --format %Y "$folder/$checkpoint"
}
before=$(when_saved)

begin_another_life() {
    if [ "${SLURM_RESTART_COUNT:-0}" -ge $((lives - 1)) ]; then
        echo "chain.sh: this was the last of $lives lives"
    elif [ "$(when_saved)" = "$before" ]; then
        echo "chain.sh: no new $folder/$checkpoint in this life: another would be the same"
    else
        scontrol requeue "$SLURM_JOB_ID" # Slurm then ends this life
    fi
    wait "$training"
    exit
}
trap begin_another_life USR1

# torch would also train on fewer GPUs than Slurm has granted.
check='
import os, torch
gpus, granted = torch.cuda.device_count(), int(os.getenv("SLURM_GPUS_ON_NODE", "1"))
assert gpus >= granted, f"torch can use only {gpus} of {granted} GPUs"
'
python -c "$check" || exit
torchrun --standalone --nproc-per-node gpu "$script" "$@" --resume --output "$folder" &
training=$!
wait "$training"
