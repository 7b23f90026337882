"""All benchmarks, one after the other; their tables on the screen, their numbers under runs/bench/.

    python benchmarks/run.py [--threads 2] [--rounds 15] [--busy]

Exit status 1 when a limit is missed.
"""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUTPUT = HERE.parent / "runs" / "bench"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15, help="turns that each alternative gets")
    parser.add_argument("--busy", action="store_true", help="count CPU time on one thread, for a machine that is busy")
    options = parser.parse_args()
    threads = f"--threads={options.threads}"
    timed = [threads, f"--rounds={options.rounds}", *(["--busy"] if options.busy else [])]
    benchmarks = {
        "train_step": [*timed, "--json"],
        "attention_cpu": [*timed, "--json"],
        "evaluation_memory": [threads, "--json"],
        "checkpoint": ["--rounds=5", threads, "--json"],
        "data_preprocessing": ["--output"],
    }
    OUTPUT.mkdir(parents=True, exist_ok=True)
    missed = False
    for name, arguments in benchmarks.items():
        command = [sys.executable, HERE / f"{name}.py", *arguments, OUTPUT / f"{name}.json"]
        missed |= subprocess.run(command, check=False).returncode != 0
    print(f"numbers: {OUTPUT}/*.json")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
