"""Training through `Engine` and DeepSpeed on a simulated CUDA device, on one rank."""

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.config import load_config
from tests.support.simulated_cuda import ROOT, SimulatedCuda, move_to_cuda

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
VOCABULARY = 50_304


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """One rank whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with SimulatedCuda():
        import deepspeed

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
        deepspeed.init_distributed(dist_backend="nccl", auto_mpi_discovery=False, verbose=False)
    yield
    deepspeed.comm.destroy_process_group()


class SimulatedTraining:
    """An engine for configuration files of `configs/` and overrides. Use it within `device`, in a
    `process_group()`.

    The model has no values: it is built on the meta device.
    """

    def __init__(self, device: SimulatedCuda, files: list[str], *overrides: str):
        from megatron.model.settings import Layout
        from megatron.training import engine

        self.device = device
        device.scalar = 0  # no overflow
        self.config = load_config(files, ROOT / "configs", list(overrides))
        dtype = DTYPES[self.config.precision.dtype]
        build = engine.GPTWithLoss

        def on_meta(*arguments: object, **options: object) -> torch.nn.Module:
            with torch.device("meta"):
                return build(*arguments, **options)  # type: ignore[arg-type]

        def to_device(module: torch.nn.Module, *_: object, **__: object) -> torch.nn.Module:
            on_device = all(parameter.device.type == "cuda" for parameter in module.parameters())
            return module if on_device else move_to_cuda(module, dtype)

        def unchanged(module: torch.nn.Module) -> torch.nn.Module:
            return module

        layout = Layout(0, 1, 1, 1, 1, 0, 0, 0, torch.device("cuda"))
        with (
            patch.multiple(
                torch.nn.Module, to=to_device, bfloat16=unchanged, half=unchanged, float=unchanged
            ),
            patch.multiple(engine, GPTWithLoss=on_meta, initialize=lambda *_, **__: None),
        ):
            self.engine = engine.build_engine(self.config, VOCABULARY, layout, lambda line: None)

    def third_step(self) -> None:
        """Train three steps; the device then has the records of the third one."""
        shape = (self.engine.micro_batch, self.config.model.seq_length)
        tokens = torch.zeros(shape, dtype=torch.long, device="cuda")
        batches: Iterator[dict[str, Tensor]] = iter(
            lambda: {"tokens": tokens, "labels": tokens}, {}
        )
        for iteration in range(3):
            self.device.reset()
            self.engine.train_step(batches, 1e-4, iteration)
