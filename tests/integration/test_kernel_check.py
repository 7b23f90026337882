"""The self-check of the fused kernels on two ranks, which agree on a verdict."""

import multiprocessing
import os
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from kerple.attention import Requirements, self_check
from megatron.model import fused_block, kernel_check, loss
from megatron.model.kernel_check import check_kernels
from megatron.utils.errors import UserError
from tests.support.language_models import small_gpt
from tests.support.processes import free_ports


def check_on_rank(rank: int, port: int, results: Connection) -> None:
    """In a fork: what `check_kernels` finds on two ranks, if only the second rank's
    GPU is broken.
    """
    os.environ.update(
        WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank)
    )
    loss.kernel_failure = fused_block.kernel_failure = lambda *_: None
    dist.init_process_group("gloo")
    lines = []
    for backend, fault in (("auto", "wrong"), ("fused", "wrong"), ("auto", "crash")):
        self_check._failures.clear()

        def check(*_, fault=fault, **__):
            if rank == 1 and fault == "crash":
                raise RuntimeError("this GPU is broken")
            return [
                self_check.Verdict(
                    f"GPU {rank}", {"result": 1e-3}, "the result is wrong" if rank else None, 0.1
                )
            ]

        kernel_check.check_attention_kernels = check
        try:
            model = small_gpt("kerple_log", attention_backend=backend)
            check_kernels(
                model, torch.device("cuda"), torch.bfloat16, training=True, report=lambda line: None
            )
            requirements = Requirements(
                dtype=torch.bfloat16, head_size=8, device=torch.device("cuda", 0)
            )
            lines.append(str(self_check.failure(requirements)))
        except (UserError, RuntimeError) as error:
            lines.append(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()
    results.send(lines)
    os._exit(
        0
    )  # the interpreter of a fork may hang at its exit, because threads of its parent held locks


def test_ranks_agree():
    (port,) = free_ports(1)
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe(duplex=False) for _ in range(2)]
    processes = [
        fork.Process(target=check_on_rank, args=(rank, port, sender))
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0, 0]
    outputs = [receiver.recv() for receiver, _ in pipes]
    expected = "failed its self-check: the result is wrong (GPU 1)"
    for fallback, configured, _ in outputs:
        assert fallback.startswith(expected)
        assert configured.startswith(f"UserError: attention-backend 'fused' {expected}")
    assert outputs[0][2].startswith("UserError: RuntimeError on another rank: this GPU is broken")
    assert outputs[1][2] == "RuntimeError: this GPU is broken"
