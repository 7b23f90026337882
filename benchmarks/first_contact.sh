#!/usr/bin/env bash
# First contact with a GPU, in at most nine minutes: the doctor, the 162M training step, the engine without host
# synchronizations, all kernels against float64, and attention against SDPA, FlashAttention and FlexAttention. Prints one
# table, with a line for each part without results; results and logs: runs/bench/first_contact.
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
failed=0 parts=

# part NAME SECONDS COMMAND...: its output goes to the terminal and to NAME.log. It ends after SECONDS, or at the deadline.
part() {
  local name=$1 limit=$2 left=$((deadline - SECONDS))
  shift 2
  parts="$parts $name"
  limit=$((left < limit ? left : limit))
  timeout -k 10 $((limit > 1 ? limit : 1)) "$PYTHON" "$@" 2>&1 | tee $out/$name.log || { failed=1; echo "$name FAILED"; }
}

part doctor 170 -m megatron.cli.doctor --jobs "$jobs" --json $out/doctor.json
part train_step 160 benchmarks/train_step_gpu.py --check $quick --seconds 110 --json $out/train_step.json $dry
part engine 60 benchmarks/engine_gpu.py --json $out/engine.json $dry
[ -n "$quick" ] || part evaluation 160 benchmarks/evaluation_gpu.py --check --seconds 90 --json $out/evaluation.json $dry
part attention 600 benchmarks/attention_gpu.py --check --jobs "$jobs" $quick --seconds 150 --json $out/attention.json $dry
"$PYTHON" -m benchmarks.support.gpu $out $parts || failed=1
exit $failed
