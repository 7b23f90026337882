"""Configurations that this machine cannot run are rejected before anything is built."""

import dataclasses

import pytest
import torch

from megatron.config import Config, UserError
from megatron.training import machine
from megatron.training.distributed import Layout
from megatron.training.machine import check_machine, check_number_of_samples
from tests.support.runs import training_settings

LAYOUT = Layout(
    rank=0,
    world_size=1,
    pipeline_size=1,
    tensor_size=1,
    data_size=1,
    stage=0,
    data_rank=0,
    tensor_rank=0,
    device=torch.device("cpu"),
)


@pytest.fixture(autouse=True)
def sixteen_gigabytes(monkeypatch):
    monkeypatch.setattr(machine, "_host_memory", lambda: 16 * 10**9)


def check(tmp_path, layout: Layout = LAYOUT, vocab_size: int = 512, **keys: object) -> None:
    check_machine(Config.from_flat(training_settings(tmp_path, "data", **keys)), layout, vocab_size)


def test_small_models_fit(tmp_path):
    check(tmp_path)
    check(tmp_path, pos_emb="learned", attention_backend="sdpa")


@pytest.mark.parametrize(
    ("keys", "vocab_size", "message"),
    [
        # 2 * 10^9 * 32 * 16 bytes
        (
            {},
            10**9,
            r"training 64,000,[0-9,]+ parameters \(64,000,000,000 in embeddings, .* needs about 1,024\.0 GB per rank",
        ),
        ({"hidden_size": 2**18}, 512, "in blocks.*this machine has 16.0 GB; reduce padded_vocab_size"),
        ({"pos_emb": "learned", "max_position_embeddings": 2**31}, 512, "68,719,476,736 in the positional method"),
        # 10^9 * 32 * 32 * 4 bytes, 2 layers
        ({"train_batch_size": 10**9}, 512, "1,000,000,000 at length 32 needs at least 8,192.0 GB for hidden states"),
        ({"seq_length": 2**31}, 512, "at length 2,147,483,648 needs at least"),
        ({"seq_length_val": 10**12}, 512, "at length 1,000,000,000,000 needs at least"),
        ({"attention_backend": "flex"}, 512, "\"attention_backend\": .*'flex' cannot compute gradients on a CPU"),
        ({"attention_backend": "fused"}, 512, "\"attention_backend\": .*'fused'"),
    ],
)
def test_what_does_not_fit(tmp_path, keys, vocab_size, message, monkeypatch):
    monkeypatch.setattr("kerple.attention.backends.triton.launch._load_kernels", lambda: None)
    with pytest.raises(UserError, match=message):
        check(tmp_path, vocab_size=vocab_size, **keys)


def test_ranks_share_the_model(tmp_path):
    keys = {"hidden_size": 2**16, "num_layers": 8}
    with pytest.raises(UserError, match="per rank"):
        check(tmp_path, **keys)
    check(tmp_path, dataclasses.replace(LAYOUT, world_size=64, pipeline_size=8, tensor_size=8), **keys)


def test_the_index_of_samples_must_fit():
    check_number_of_samples(10**9)
    with pytest.raises(UserError, match=r"needs 2,000,000,000 samples, whose index takes 24\.0 GB"):
        check_number_of_samples(2 * 10**9)
