#!/usr/bin/env bash
# All GPU benchmarks, each checked against float64 first; about ten minutes in total. Results: runs/bench/*_gpu.json.
# They need only PyTorch and Triton. Set PYTHON to the interpreter that has them. Options are passed to all three
# (--dry-run: tiny sizes on a CPU).
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
export PYTHONUNBUFFERED=1
failed=0
"$PYTHON" benchmarks/attention_gpu.py --check --seconds 240 "$@" || failed=1
"$PYTHON" benchmarks/train_step_gpu.py --check --seconds 180 "$@" || failed=1
"$PYTHON" benchmarks/evaluation_gpu.py --check --seconds 90 "$@" || failed=1
exit $failed
