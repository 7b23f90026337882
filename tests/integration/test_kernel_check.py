"""The self-check of the fused kernels on two ranks, which agree on a verdict."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

RANK = """
import torch
import torch.distributed as dist
from kerple.attention import Attention, Requirements, self_check
from megatron.model import fused_block, loss
from megatron.model.kernel_check import check_kernels
from megatron.utils.errors import UserError
from tests.support.language_models import small_gpt

loss.kernel_failure = lambda device, dtype: None
fused_block.kernel_failure = lambda block, device, dtype: None
dist.init_process_group("gloo")
rank = dist.get_rank()
for backend, fault in (("auto", "wrong"), ("fused", "wrong"), ("auto", "crash")):
    self_check._failures.clear()

    def check(*arguments, **options):  # only the second rank's GPU is broken
        if rank == 1 and fault == "crash":
            raise RuntimeError("this GPU is broken")
        return [self_check.Verdict(f"GPU {rank}", {}, "the result is wrong" if rank else None)]

    Attention.check_kernels = check
    try:
        model = small_gpt("kerple_log", attention_backend=backend)
        check_kernels(model, torch.device("cuda"), torch.bfloat16, training=True, report=lambda line: None)
        print(self_check.failure(Requirements(dtype=torch.bfloat16, head_size=8, device=torch.device("cuda", 0))))
    except (UserError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}")
dist.destroy_process_group()
"""


def test_ranks_agree():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK],
            env={**os.environ, **common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0].splitlines() for process in processes]
    for fallback, configured, _ in outputs:
        assert fallback.startswith("failed its self-check: the result is wrong (GPU 1)")
        assert configured.startswith(
            "UserError: attention-backend 'fused' failed its self-check: the result is wrong (GPU 1)"
        )
    assert outputs[0][2].startswith("UserError: RuntimeError on another rank: this GPU is broken")
    assert outputs[1][2] == "RuntimeError: this GPU is broken"
