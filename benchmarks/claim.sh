#!/usr/bin/env bash
# Makes docs/claim.svg out of real runs: the six scripts train on the same images on 1, 2 and 4
# processes, on two hosts, in turn on one run, and killed ten times. Some minutes; it needs root
# and iproute2 for the two hosts.
#
#   bash benchmarks/claim.sh DATASET      # a folder with train/ and test/, as for --dataset
set -euo pipefail
dataset=$(realpath "$1")
top=$(realpath "$(dirname "$0")/..")
PYTHON=${PYTHON:-python}
export OMP_NUM_THREADS=1
flags=(--dataset "$dataset" --model mlp --batch-size 100 --lr 0.001 --augment --log-every 10
    --checkpoint-minutes 0 --resume)
scratch=$(mktemp -d)
cd "$scratch"
runs=() # their names in the order of the picture

run() { # NAME EPOCHS COMMAND...
    [[ " ${runs[*]} " == *" $1 "* ]] || runs+=("$1")
    echo "$1"
    "${@:3}" "${flags[@]}" --epochs "$2" --output "$1" >> "$1.log"
    test -e "$1/model.pt" # for several machines: `wait` doesn't tell whether one has failed
}
torchrun() { "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$@"; }
several_machines() { # COUNT WORDS...: one process each
    for ((rank = 0; rank < $1; rank++)); do
        "$PYTHON" "$top/train_ddp_multigpu_proc.py" --init-method "file://$scratch/meet-$1" \
            --world-size "$1" --rank "$rank" "${@:2}" &
    done
    wait
}
two_hosts() { # WORDS...: two processes on each of two network namespaces
    for i in 0 1; do ip netns add "claim$i"; done
    trap 'ip netns del claim0; ip netns del claim1' EXIT
    ip link add v0 netns claim0 type veth peer name v1 netns claim1
    for i in 0 1; do
        ip -n "claim$i" addr add "10.78.0.$((i + 1))/24" dev "v$i"
        ip -n "claim$i" link set "v$i" up
        ip -n "claim$i" link set lo up
    done
    for i in 0 1; do
        ip netns exec "claim$i" env "GLOO_SOCKET_IFNAME=v$i" "$PYTHON" -m torch.distributed.run \
            --nnodes 2 --node-rank "$i" --master-addr 10.78.0.1 --nproc-per-node 2 \
            "$top/train_ddp_torchrun.py" "$@" &
    done
    wait
}
past() { # K LOG: is a run of six epochs past K elevenths, by its last progress line?
    awk -v k="$1" '/ step [0-9]+\// { split($2, epoch, "/"); split($4, step, "/")
        at = epoch[1] - 1 + step[1] / step[2] } END { exit (at < 6 * k / 11) }' "$2" 2> /dev/null
}

run single 6 "$PYTHON" "$top/train_single.py"
run dp 6 "$PYTHON" "$top/train_dp.py"
for count in 1 2 4; do
    run "ddp_spawn-$count" 6 "$PYTHON" "$top/train_ddp_spawn.py" --nproc-per-node "$count"
    run "ddp_torchrun-$count" 6 torchrun "$count" "$top/train_ddp_torchrun.py"
    run "ddp_multigpu_proc-$count" 6 several_machines "$count"
    run "fsdp2-$count" 6 torchrun "$count" "$top/train_fsdp2.py"
done
run "two-hosts-of-two" 6 two_hosts
run "three-scripts-in-turn" 2 "$PYTHON" "$top/train_single.py"
run "three-scripts-in-turn" 4 torchrun 2 "$top/train_fsdp2.py"
run "three-scripts-in-turn" 6 torchrun 4 "$top/train_ddp_torchrun.py"
for ((life = 1; life <= 10; life++)); do
    run "killed-ten-times" 6 "$PYTHON" "$top/train_single.py" 2> /dev/null & # its own shell
    until past "$life" killed-ten-times.log; do sleep 0.02; done
    pkill -KILL -P $! || true
    wait || true
done
run "killed-ten-times" 6 "$PYTHON" "$top/train_single.py"
rm three-scripts-in-turn.log # marks are for kills
"$PYTHON" "$top/benchmarks/curves.py" "${runs[@]}" --compare --output "$top/docs/claim.svg"
rm -r "$scratch"
