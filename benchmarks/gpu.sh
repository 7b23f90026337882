#!/usr/bin/env bash
# Check the GPU with `python -m kerple.doctor`, then run all GPU benchmarks, each checked against float64 first; about
# ten minutes in total. Results: runs/bench/doctor.json and *_gpu.json. If the doctor finds a failure, the benchmarks do
# not run, unless --ignore-doctor is given. They need only PyTorch and Triton. Set PYTHON to the interpreter that has
# them. Other options are passed to all benchmarks (--dry-run: tiny sizes on a CPU).
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
export PYTHONUNBUFFERED=1
ignore_doctor=0
for option; do  # keep all others
  shift
  if [ "$option" = --ignore-doctor ]; then ignore_doctor=1; else set -- "$@" "$option"; fi
done
mkdir -p runs/bench
failed=0
"$PYTHON" -m kerple.doctor --json runs/bench/doctor.json || failed=1
if [ $failed = 1 ] && [ $ignore_doctor = 0 ]; then
  echo "The doctor found a failure, so the benchmarks do not run. --ignore-doctor runs them anyway."
  exit 1
fi
"$PYTHON" benchmarks/attention_gpu.py --check --seconds 240 "$@" || failed=1
"$PYTHON" benchmarks/train_step_gpu.py --check --seconds 180 "$@" || failed=1
"$PYTHON" benchmarks/evaluation_gpu.py --check --seconds 90 "$@" || failed=1
exit $failed
