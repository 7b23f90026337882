"""Shared by the GPU benchmarks: timing with CUDA events, a time limit, and results that are written
immediately.

`python -m benchmarks.support.gpu FOLDER [PART ...]` prints the results in a folder as one table,
with a line for each missing part.

`--dry-run` runs everything at toy sizes on a CPU, where Triton's interpreter runs the fused
kernels. Its times are meaningless.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads this when it is imported

T = TypeVar("T")
Row = dict[str, Any]


class Bench:
    """A benchmark run: its options, device, time limit and results."""

    def __init__(self, description: str, output: str):
        parser = argparse.ArgumentParser(description=description.partition("\n\n")[0])
        parser.add_argument(
            "--check",
            action="store_true",
            help="compare with float64 first; stop if results differ",
        )
        parser.add_argument(
            "--seconds",
            type=float,
            default=200.0,
            help="start no measurement after this time, which begins after --check",
        )
        parser.add_argument(
            "--json", type=Path, default=Path("runs/bench") / output, help="file for the results"
        )
        parser.add_argument(
            "--dry-run", action="store_true", help="toy sizes on a CPU; its times are meaningless"
        )
        parser.add_argument("--quick", action="store_true", help="fewer lengths and alternatives")
        parser.add_argument(
            "--jobs",
            type=int,
            default=1,
            help="processes that share --check, which compiles kernels",
        )
        parser.add_argument("--tune", action="store_true", help=argparse.SUPPRESS)
        self.options = parser.parse_args()
        self.dry = self.options.dry_run
        if not self.dry and not torch.cuda.is_available():
            raise SystemExit("no GPU found; --dry-run runs the benchmark at toy sizes on a CPU")
        self.device = torch.device(self.sized("cuda", "cpu"))

        # The time limit begins after the check, which compiles all kernels.
        self.started = time.monotonic()
        if self.options.check:
            self.started = math.inf
        self.rows: list[Row] = []
        self.results: dict[str, object] = {
            "hardware": self._hardware(),
            "command": sys.argv,
            "rows": self.rows,
        }
        self._write()

    def sized(self, full: T, toy: T) -> T:
        """The value for measurements, or that of a dry run."""
        if self.dry:
            return toy
        return full

    def _hardware(self) -> dict[str, object]:
        name = "CPU, dry run: times are meaningless"
        if not self.dry:
            name = torch.cuda.get_device_name()

        # Triton is missing on some machines, git on others.
        try:
            from triton import __version__ as triton
        except ImportError:
            triton = None
        commit = ""
        if shutil.which("git"):
            git = ["git", "rev-parse", "--short", "HEAD"]
            folder = Path(__file__).parent
            found = subprocess.run(git, cwd=folder, capture_output=True, text=True)
            commit = found.stdout.strip()
        return {
            "device": name,
            "torch": f"torch {torch.__version__}",
            "triton": f"triton {triton}",
            "commit": f"commit {commit or 'unknown'}",
            "date": time.strftime("%Y-%m-%d"),
        }

    @property
    def expired(self) -> bool:
        """Whether the time limit is reached."""
        return time.monotonic() - self.started > self.options.seconds

    def measure(self, run: Callable[[], object], *, seconds: float = 0.4) -> tuple[float, int]:
        """Median seconds of a run, and the bytes of its peak memory that it allocated itself."""
        run()  # compiles
        if self.dry:
            started = time.perf_counter()
            run()
            return time.perf_counter() - started, 0

        # One run for the memory, and to estimate how many fit into the seconds.
        run()
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        estimate = time.perf_counter() - started
        peak = torch.cuda.max_memory_allocated() - allocated

        # Events do not wait for the device between runs.
        runs = int(seconds / max(estimate, 1e-5))
        runs = max(3, min(50, runs))
        events = []
        for _ in range(runs):
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        milliseconds = statistics.median(begin.elapsed_time(end) for begin, end in events)
        return milliseconds / 1e3, peak

    def attempt(self, row: Row, measurement: Callable[[], Row]) -> Row | None:
        """Add a measurement, or the reason of its failure, to a row, and write the row."""
        if self.expired:
            self.add({**row, "skipped": "time limit"})
            return None
        try:
            row |= measurement()
        except Exception as error:  # a failed measurement must not prevent the next one
            reason, _, _ = str(error).partition("\n")
            row["failed"] = f"{type(error).__name__}: {reason}"[:300]
            if not self.dry:
                torch.cuda.empty_cache()
        self.add(row)
        return row

    def add(self, row: Row) -> None:
        """Write and print a row of the results."""
        self.rows.append(row)
        self._write()
        print(json.dumps(row), flush=True)

    def record_check(self, passed: bool, **details: object) -> bool:
        """Write and print the result of `--check`, and start the clock. Returns `passed`."""
        self.started = time.monotonic()
        self.results |= {"check_passed": passed, **details}
        self._write()
        line = "check: FAILED"
        if passed:
            line = "check: passed"
        for name, value in details.items():
            words = name.replace("_", " ")
            line += f"; {words}: {value}"
        print(line, flush=True)
        return passed

    def _write(self) -> None:
        path = self.options.json
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self.results, indent=1) + "\n")
        partial.replace(path)


def close_enough(actual: torch.Tensor, exact: torch.Tensor, tolerance: float) -> tuple[bool, float]:
    """Whether the relative error, in the 2-norm, is within the tolerance; and the error."""
    difference = (actual.double() - exact).norm()
    error = difference / exact.norm().clamp(min=1e-30)
    return error.item() <= tolerance, error.item()


def print_results(folder: Path, parts: Sequence[str] = ()) -> int:
    """Print a line for each row of each file in a folder, and for each of the `parts` without a
    file. Returns 1 if one of them failed, or if a file has no measurement, else 0.
    """
    missing = [part for part in parts if not (folder / f"{part}.json").exists()]
    failed = bool(missing) or not any(folder.glob("*.json"))
    for part in missing:
        print(f"{part:<12} no results: it failed or had no time; see {folder / part}.log")

    for path in sorted(folder.glob("*.json")):
        results = json.loads(path.read_text())
        if path.stem == "doctor":
            rows = _doctor_rows(results)
        else:
            failed |= all("check" in row or "skipped" in row for row in results["rows"])
            hardware = results.get("hardware", {}).values()
            print(f"{path.stem:<12} {', '.join(map(str, hardware))}")
            rows = _benchmark_rows(results)

        # A line per row.
        for row in rows:
            failed |= "failed" in row
            failed |= row.get("ok") is False or row.get("passed") is False
            cells = []
            for name, value in row.items():
                if isinstance(value, float):
                    value = f"{value:.4g}"
                cells.append(f"{name} {value}")
            print(f"{path.stem:<12} {', '.join(cells)}")
    return int(failed)


def _doctor_rows(results: Row) -> list[Row]:
    """The checks of the doctor that failed, and a summary."""
    checks = results["checks"]
    rows = [check for check in checks if check["failure"] is not None]
    rows.append({"checks": len(checks), "passed": results["passed"]})
    return rows


def _benchmark_rows(results: Row) -> list[Row]:
    """The measurements and the checks that failed, and a summary of the checks."""
    rows = []
    passed = 0
    for row in results["rows"]:
        if "check" in row and "failed" not in row and row.get("ok", True):
            passed += 1
        else:
            rows.append(row)
    if "check_passed" in results:
        rows.append({"checks": passed, "passed": results["check_passed"]})
    return rows


if __name__ == "__main__":
    sys.exit(print_results(Path(sys.argv[1]), sys.argv[2:]))
