"""Run all CPU benchmarks: print their tables and write the results to runs/bench/.

    python benchmarks/run.py [--threads 2] [--rounds 15] [--busy]

The exit status is 1 if a limit is exceeded.
"""

import argparse
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.utils.command_line import run_main

HERE = Path(__file__).resolve().parent
OUTPUT = HERE.parent / "runs" / "bench"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15, help="measurements per alternative")
    parser.add_argument(
        "--busy",
        action="store_true",
        help="measure CPU time on one thread, for a machine with other load",
    )
    options = parser.parse_args()
    threads = f"--threads={options.threads}"
    timed = [threads, f"--rounds={options.rounds}"]
    if options.busy:
        timed.append("--busy")
    benchmarks = {
        "train_step": [*timed, "--json"],
        "attention_cpu": [*timed, "--json"],
        "evaluation_memory": [threads, "--json"],
        "checkpoint": ["--rounds=5", threads, "--json"],
        "data_preprocessing": ["--output"],
    }
    OUTPUT.mkdir(parents=True, exist_ok=True)
    failed = False
    for name, arguments in benchmarks.items():
        command = [sys.executable, f"{HERE}/{name}.py", *arguments, f"{OUTPUT}/{name}.json"]
        failed |= subprocess.run(command, check=False).returncode != 0
    print(f"results: {OUTPUT}/*.json")
    return int(failed)


if __name__ == "__main__":
    sys.exit(run_main(main))
