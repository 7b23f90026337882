#!/usr/bin/env bash
# First contact with a GPU, in at most nine minutes: the doctor, the engine without host synchronizations, all kernels
# against float64, attention against SDPA, FlexAttention and FlashAttention, and the 162M training step. Prints one table;
# results and logs: runs/bench/first_contact.
#
#     PYTHON=python3 bash benchmarks/first_contact.sh [--full] [--dry-run]
#
# PYTHON needs PyTorch and Triton; the engine also needs DeepSpeed, megatron-core and pydantic. --full measures all
# lengths and alternatives, and evaluation, in about twenty minutes. --dry-run runs toy sizes on a CPU.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
export PYTHONUNBUFFERED=1
quick=--quick dry=
for option; do
  case $option in
    --full) quick= ;;
    --dry-run) dry=--dry-run; export TRITON_INTERPRET=1 DS_ACCELERATOR=cpu ;;
    *) echo "unknown option $option; use --full or --dry-run" >&2; exit 2 ;;
  esac
done
out=runs/bench/first_contact
mkdir -p $out
rm -f $out/*.json $out/*.log
jobs=$(nproc)
jobs=$((jobs < 14 ? jobs : 14))  # each has a CUDA context
deadline=$((SECONDS + 520))
[ -n "$quick" ] || deadline=$((SECONDS + 1200))
failed=0

part() {  # part NAME COMMAND...: its output goes to the terminal and to NAME.log; it ends at the deadline
  local name=$1 left=$((deadline - SECONDS))
  shift
  timeout -k 10 $((left > 1 ? left : 1)) "$PYTHON" "$@" 2>&1 | tee $out/$name.log || { failed=1; echo "$name FAILED"; }
}

part doctor -m megatron.cli.doctor --jobs "$jobs" --json $out/doctor.json
part engine benchmarks/engine_gpu.py --json $out/engine.json $dry
part attention benchmarks/attention_gpu.py --check --jobs "$jobs" $quick --seconds 150 --json $out/attention.json $dry
part train_step benchmarks/train_step_gpu.py --check $quick --seconds 120 --json $out/train_step.json $dry
[ -n "$quick" ] || part evaluation benchmarks/evaluation_gpu.py --check --seconds 90 --json $out/evaluation.json $dry
"$PYTHON" -m benchmarks.support.gpu $out || failed=1
exit $failed
