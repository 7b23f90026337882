"""Profiling of training steps with torch.profiler, by GPT-NeoX's `profile` keys."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, schedule, tensorboard_trace_handler

from megatron.config import Config
from megatron.training.distributed import Layout

ROWS = 12  # operators in the log


@contextlib.contextmanager
def profiled_steps(
    config: Config, layout: Layout, iteration: int, report: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """If `profile` is true, profile the steps with `profile_step_start` to `profile_step_stop` - 1 earlier steps.

    Yields a function to call after every training step, the first of which follows `iteration` earlier steps. The step
    before the profiled ones is a warm-up, if there is one.

    Every rank writes its trace to `tensorboard_dir` (or `log_dir`), rank_N.TIME.pt.trace.json, and the table of its
    operators to rank_N.operators.txt. `report` prints those with the longest time on rank 0. On a GPU, the same steps
    are also marked for `nsys profile --capture-range=cudaProfilerApi`.
    """
    settings = config.logging
    first, last = max(settings.profile_step_start, iteration), settings.profile_step_stop
    if not settings.profile:
        yield lambda: None
        return
    if first >= last:
        report(f"profile: no step is profiled, because training resumes after profile_step_stop {last:,}")
        yield lambda: None
        return
    folder = Path(settings.tensorboard_dir or settings.log_dir or ".")
    write_trace = tensorboard_trace_handler(str(folder), worker_name=f"rank_{layout.rank}")
    time = "self_device_time_total" if layout.device.type == "cuda" else "self_cpu_time_total"
    steps_before, steps = first - iteration, 0

    def write(profiler: Any) -> None:
        write_trace(profiler)
        operators = profiler.key_averages()
        table = operators.table(sort_by=time, row_limit=-1, max_name_column_width=100)
        (folder / f"rank_{layout.rank}.operators.txt").write_text(table)
        total = max(sum(getattr(operator, time) for operator in operators), 1e-9)
        report(f"profile: iterations {first + 1:,} to {iteration + steps:,}; traces and tables are in {folder}")
        for operator in sorted(operators, key=lambda operator: -getattr(operator, time))[:ROWS]:
            spent = getattr(operator, time)
            report(f"  {spent / total:6.1%} {spent / 1e3:10.2f} ms {operator.count:8,} calls  {operator.key[:60]}")

    def mark_steps() -> None:
        if layout.device.type == "cuda" and steps == steps_before:
            torch.cuda.profiler.start()
        elif layout.device.type == "cuda" and steps == last - iteration:
            torch.cuda.profiler.stop()

    warmup = min(steps_before, 1)
    plan = schedule(wait=steps_before - warmup, warmup=warmup, active=last - first, repeat=1)
    with profile(
        schedule=plan, on_trace_ready=write, record_shapes=True, profile_memory=True, with_flops=True
    ) as profiler:

        def step() -> None:
            nonlocal steps
            steps += 1
            profiler.step()
            mark_steps()

        mark_steps()
        yield step
