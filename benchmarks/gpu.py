"""What the GPU benchmarks share: timing by the device's own clock, a budget of seconds, results kept as they come.

`--dry-run` goes through everything at toy sizes on a CPU, where the fused kernels are interpreted: its times mean
nothing.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch


class Bench:
    """One benchmark's run: its device, what is left of its time, and its results."""

    def __init__(self, description: str, output: str):
        parser = argparse.ArgumentParser(description=description.partition("\n")[0])
        parser.add_argument("--check", action="store_true", help="compare with float64 first; stop where it is missed")
        parser.add_argument("--seconds", type=float, default=200.0, help="start no measurement after so many")
        parser.add_argument("--json", type=Path, default=Path("runs/bench") / output)
        parser.add_argument("--dry-run", action="store_true", help="toy sizes on a CPU; times mean nothing")
        parser.add_argument("--tune", action="store_true", help=argparse.SUPPRESS)
        self.options = parser.parse_args()
        self.dry = self.options.dry_run
        if self.dry:
            # The kernels are defined when the fused backend first runs, and are told then.
            os.environ["TRITON_INTERPRET"] = "1"
        if not self.dry and not torch.cuda.is_available():
            raise SystemExit("no GPU here: nothing to measure (--dry-run goes through the motions on a CPU)")
        self.device = torch.device("cpu" if self.dry else "cuda")
        self.started = time.monotonic()
        self.results: dict[str, object] = {"hardware": self._hardware(), "command": sys.argv, "rows": []}
        self._keep()

    def _hardware(self) -> dict[str, object]:
        name = "CPU, dry run: times mean nothing" if self.dry else torch.cuda.get_device_name()
        try:
            import triton
        except ImportError:
            triton = None
        return {"device": name, "torch": torch.__version__, "triton": getattr(triton, "__version__", None)}

    @property
    def over(self) -> bool:
        """The time is up."""
        return time.monotonic() - self.started > self.options.seconds

    def measure(self, run: Callable[[], object], *, seconds: float = 0.4) -> tuple[float, int]:
        """Median seconds of a run, and the most bytes that it added to what was allocated."""
        run()  # compiles
        if self.dry:
            started = time.perf_counter()
            run()
            return time.perf_counter() - started, 0
        run()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        once = time.perf_counter() - started
        peak = torch.cuda.max_memory_allocated() - held
        times = []
        for _ in range(max(3, min(50, int(seconds / max(once, 1e-5))))):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            times.append((begin, end))
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in times) / 1e3, peak

    def attempt(self, row: dict[str, object], measurement: Callable[[], dict[str, object]]) -> dict[str, object] | None:
        """Add a measurement to a row and keep it; what fails (out of memory, say) is kept as its reason."""
        if self.over:
            print(f"no time left for {row}", flush=True)
            return None
        try:
            row |= measurement()
        except Exception as error:  # one that fails must not cost the others
            row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
            if not self.dry:
                torch.cuda.empty_cache()
        self.results["rows"].append(row)
        self._keep()
        print(json.dumps(row), flush=True)
        return row

    def note(self, **values: object) -> None:
        self.results |= values
        self._keep()

    def checked(self, passed: bool, **facts: object) -> bool:
        """Keep and print what a comparison before all measurements gave; `passed` again."""
        self.note(check_passed=passed, **facts)
        also = "".join(f"; {name.replace('_', ' ')}: {value}" for name, value in facts.items())
        print(f"check: {'passed' if passed else 'FAILED'}{also}", flush=True)
        return passed

    def _keep(self) -> None:
        path = self.options.json
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self.results, indent=1) + "\n")
        partial.replace(path)


def close_enough(found: torch.Tensor, exact: torch.Tensor, tolerance: float) -> tuple[bool, float]:
    """Whether the relative error, in the 2-norm, is within the tolerance; and the error."""
    error = ((found.double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()
    return error <= tolerance, error
