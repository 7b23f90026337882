import pytest

from megatron.config import Config, UserError
from megatron.config.schema import split_shares
from megatron.config.schema.training import TrainingConfig


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({}, "fp32"),
        ({"precision": "fp32"}, "fp32"),
        ({"precision": "fp16"}, "fp16"),
        ({"precision": "bfloat16"}, "bf16"),
        ({"fp16": {"enabled": False, "type": "bfloat16"}}, "fp32"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"fp16": {"enabled": True, "type": "bfloat16"}}, "bf16"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, "bf16"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True, "type": "bf16"}, "precision": "bfloat16"}, "bf16"),
        ({"fp16": None}, "fp32"),
    ],
)
def test_precision(flat, keys, dtype):
    assert Config.from_flat({**flat, **keys}).precision.dtype == dtype


@pytest.mark.parametrize(
    "keys",
    [
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        {"precision": "fp32", "bf16": {"enabled": True}},
        {"precision": "fp16", "fp16": {"enabled": True, "type": "bfloat16"}},
    ],
)
def test_contradictory_precision(flat, keys):
    with pytest.raises(UserError, match=r"contradictory precision: \w+ requests \w+ but \w+ requests \w+"):
        Config.from_flat({**flat, **keys})


def test_split_shares():
    assert split_shares("949,50,1") == [949.0, 50.0, 1.0]
    assert split_shares("1") == [1.0, 0.0, 0.0]
    for split in ("", "1,2,3,4", "0,0", "-1,2", "1 2", "inf,1"):
        with pytest.raises(UserError, match="is not of the form TRAIN,VALID,TEST"):
            split_shares(split)


def test_extrapolation_budget():
    assert TrainingConfig(extrapolation_lengths=[16, 32]).extrapolation_budget == 65_536
    assert TrainingConfig(extrapolation_lengths=[131_072]).extrapolation_budget == 131_072
    assert TrainingConfig(extrapolation_lengths=[16], extrapolation_tokens=64).extrapolation_budget == 64


def test_steps_of_checkpoints(flat):
    def steps(**keys) -> list[int]:
        checkpoint = Config.from_flat({**flat, **keys}).checkpoint
        return [step for step in range(101) if checkpoint.saves(step)]

    assert steps() == []
    assert steps(**{"checkpoint-factor": 20}) == [20, 40, 60, 80, 100]
    assert steps(save_interval=50.0, extra_save_iters=[0, 1, 7, 50]) == [0, 1, 7, 50, 100]
    assert steps(**{"checkpoint-scale": "log", "checkpoint-factor": 2}) == [1, 2, 4, 8, 16, 32, 64]
    # 1, 1.5, 2.25, 3.375, 5.0625 ...
    assert steps(checkpoint_scale="log", checkpoint_factor=1.5) == [1, 2, 3, 5, 7, 11, 17, 25, 38, 57, 86]
    assert steps(checkpoint_scale="log", extra_save_iters=[3]) == [3]
    with pytest.raises(UserError, match=r"save_interval 2\.5 must be an integer, unless checkpoint_scale is log"):
        steps(save_interval=2.5)
    with pytest.raises(UserError, match=r"save_interval 1\.0 with checkpoint_scale log .* at least 1\.01"):
        steps(save_interval=1, checkpoint_scale="log")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("reduce_bucket_size", 0, "must be an integer from 1 to"),
        ("allgather_bucket_size", True, "must be an integer from 1 to"),
        ("stage3_max_live_parameters", 0.5, "must be an integer from 0 to"),
        ("overlap_comm", 1, "must be true or false, not 1"),
        ("offload_param", {"device": "gpu"}, "must be a mapping with the key device, one of none, cpu, nvme"),
        ("offload_optimizer", "cpu", "must be a mapping with the key device"),
        ("cpu_offload", True, "cpu_offload are not supported"),
        ("offload_optimizer", {"device": "cpu"}, "cpu_offload are not supported"),
    ],
)
def test_values_of_zero_keys_are_checked(flat, key, value, message):
    with pytest.raises(UserError, match=message) as caught:
        Config.from_flat({**flat, "zero_optimization": {"stage": 2, key: value}})
    assert key in str(caught.value)


def test_paths_that_no_file_can_have(flat):
    for path in ("x" * 300, "a/" * 3000, "", " "):
        with pytest.raises(
            UserError, match=r'"save": (must be the name of a file|must be a path of at most 4000 bytes)'
        ):
            Config.from_flat({**flat, "save": path})
    Config.from_flat({**flat, "save": "é" * 100, "train_data_paths": ["a" * 200]})
    with pytest.raises(UserError, match=r'"train_data_paths.1": .*names of at most 200'):
        Config.from_flat({**flat, "train_data_paths": ["a", "é" * 101]})
