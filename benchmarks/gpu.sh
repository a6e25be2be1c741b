#!/usr/bin/env bash
# What the GPUs of this machine show: five tables, printed and kept in $OUT (gpu/).
#
#   bash benchmarks/gpu.sh                # all five, or those that are named: `gpu.sh scripts resume`
#   TINY=1 bash benchmarks/gpu.sh         # tiny sizes, on a CPU: does every command run?
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p "${OUT:=gpu}"
images=(--model resnet18 --image-size 224 --samples 20480 --batch-size 256 --epochs 4)
language=(--units 768 --layers 14 --window 1024 --samples 4096 --batch-size 32 --epochs 3)
resume=(--model resnet18 --image-size 64 --samples 10240 --batch-size 256)
if [[ ${TINY:-} ]]; then
    export TORCH_COMPILE_DISABLE=1 OMP_NUM_THREADS=1
    images=(--model mlp --samples 64 --batch-size 8 --epochs 2)
    language=(--units 64 --layers 1 --window 8 --samples 64 --batch-size 8 --epochs 2 --first 1)
    resume=(--model mlp --samples 128 --batch-size 4 --first 1)
fi
[[ $# -gt 0 ]] || set -- tests scripts language settings resume
failed=0
for part; do # one that fails does not keep the others from running
    case $part in
    tests) nvidia-smi -L || true # what only a GPU shows, test by test
        command=(-m pytest -m gpu -v) ;;
    language) command=(benchmarks/gpu.py language "${language[@]}") ;;
    resume) command=(benchmarks/gpu.py resume "${resume[@]}") ;;
    *) command=(benchmarks/gpu.py "$part" "${images[@]}") ;;
    esac
    "${PYTHON:-python}" "${command[@]}" | tee "$OUT/$part.md" || failed=1
done
exit "$failed"
