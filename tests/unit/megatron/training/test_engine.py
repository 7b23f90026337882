"""A training step does not wait for the device; errors of the engine."""

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config import UserError
from megatron.training.engine import Engine
from tests.support.runs import metrics, trained

# Operators that copy values to the host: item(), int(), float(), bool() and `if` use the first.
# Copies of tensors to the CPU cannot be detected on a CPU.
HOST_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}


class HostReads(TorchDispatchMode):
    """Records the operators that copy values to the host."""

    def __init__(self):
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        if operator in HOST_READS:
            self.operators.append(str(operator))
        return operator(*arguments, **(keywords or {}))


@pytest.mark.parametrize(
    ("pos_emb", "backend", "precision"),
    [("kerple_bias_wht", "reference", "fp32"), ("rpe", "sdpa", "bfloat16")],
)
def test_a_step_reads_no_tensor_on_the_host(
    pos_emb, backend, precision, tmp_path, data_path, monkeypatch
):
    """With clipping and gradient accumulation, and backends that treat a CPU like a GPU.

    Batches are fetched before the step, because they are read on the host.
    """
    step, reads, waits = Engine.train_step, [], []
    monkeypatch.setattr(get_accelerator(), "synchronize", lambda *_: waits.append(1))

    def watched(engine, batches, *arguments):
        fetched = [next(batches) for _ in range(engine.accumulation)]
        with HostReads() as watch:
            loss = step(engine, iter(fetched), *arguments)
        reads.append(watch.operators)
        return loss

    monkeypatch.setattr(Engine, "train_step", watched)
    keys = {
        "pos_emb": pos_emb,
        "attention_backend": backend,
        "precision": precision,
        "gradient_clipping": 0.5,
    }
    keys |= {
        "gradient_accumulation_steps": 2,
        "train_iters": 3,
        "eval_iters": 0,
        "save": None,
        "load": None,
    }
    trained(tmp_path, data_path, **keys)
    assert reads == [[]] * 3
    assert not waits  # of DeepSpeed's timers
    assert all(
        norm > 0.5 for norm in metrics(tmp_path, "train/grad_norm").values()
    )  # so gradients were clipped


@pytest.mark.parametrize(
    "read", [torch.Tensor.item, bool, float, lambda tensor: torch.equal(tensor, tensor)]
)
def test_reads_are_detected(read):
    with HostReads() as watch:
        read(torch.ones(()))
    assert watch.operators


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "reduce_bucket_size"),
        ({"zero_optimization": {"reduce_skatter": True}}, "reduce_skatter.*reduce_scatter"),
        (
            {"zero_optimization": {"stage3_max_live_parameter": 1}},
            "live_parameter.*stage3_max_live_parameters",
        ),
        ({"zero_optimization": {"stgae": 2}}, "stgae.* stage,"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}}, "offload_param"),
        (
            {"zero_optimization": {"stage": 2, "round_robin_gradients": "often"}},
            "round_robin_gradients",
        ),
        ({"deepspeed_extra_args": {"comms_logger": {"prof_opps": []}}}, "prof_opps"),
    ],
)
def test_keys_that_deepspeed_rejects_are_named_before_the_data_are_read(keys, named, tmp_path):
    with pytest.raises(UserError, match=f"{next(iter(keys))}.*{named}"):
        trained(tmp_path, str(tmp_path / "nowhere"), train_iters=1, **keys)


def test_extra_arguments_reach_deepspeed(tmp_path, data_path, monkeypatch):
    """GPT-NeoX's 19M.yml has a comms_logger."""
    received = []
    monkeypatch.setattr(
        deepspeed.comm, "configure", lambda config, *_, **__: received.append(config)
    )
    logger = {"enabled": True, "verbose": False, "prof_all": True, "debug": False}
    trained(
        tmp_path,
        data_path,
        train_iters=1,
        eval_iters=0,
        deepspeed_extra_args={"comms_logger": logger},
    )
    assert received[0].comms_config.comms_logger.model_dump() == {**logger, "prof_ops": []}
