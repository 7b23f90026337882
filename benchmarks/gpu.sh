#!/usr/bin/env bash
# All GPU benchmarks, each checked against float64 first; at most about ten minutes. Results: runs/bench/*_gpu.json.
# PyTorch and Triton are all they need. Set PYTHON to the interpreter that has them; further options go to all three
# (--dry-run: toy sizes on a CPU).
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
export PYTHONUNBUFFERED=1
failed=0
"$PYTHON" benchmarks/attention_gpu.py --check --seconds 240 "$@" || failed=1
"$PYTHON" benchmarks/train_step_gpu.py --check --seconds 180 "$@" || failed=1
"$PYTHON" benchmarks/evaluation_gpu.py --check --seconds 90 "$@" || failed=1
exit $failed
