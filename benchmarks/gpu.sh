#!/usr/bin/env bash
# Checks kv8 on a GPU against its reference, then measures it: one script, under four minutes,
# nothing is built or downloaded. Needs torch, triton and transformers; FlashAttention 3 and
# accelerate are used where they are installed.
#
#   benchmarks/gpu.sh [FOLDER]    results go to FOLDER (by default $OUT, else gpu_results)
#
# PYTHON names the interpreter; further arguments go to `python -m benchmarks.gpu` (--help).
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:-${OUT:-gpu_results}}
export PYTHONPATH=src:. PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec timeout --kill-after=5 235 "${PYTHON:-python3}" -m benchmarks.gpu --out "$folder" "${@:2}"
