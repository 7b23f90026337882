"""Configurations that this machine cannot run are rejected before anything is built, with the memory they need."""

import dataclasses

import pytest

from megatron.config import Config, UserError
from megatron.training import machine, memory
from megatron.training.distributed import Layout
from megatron.training.machine import check_machine, check_number_of_samples
from tests.support.layouts import ONE_RANK as LAYOUT
from tests.support.runs import training_settings


@pytest.fixture(autouse=True)
def sixteen_gigabytes(monkeypatch):
    for module in (machine, memory):
        monkeypatch.setattr(module, "free_memory", lambda device="cpu": 16 * 10**9)


def check(tmp_path, layout: Layout = LAYOUT, vocab_size: int = 512, **keys: object) -> None:
    config = Config.from_flat(training_settings(tmp_path, "data", **keys))
    check_machine(config, layout, vocab_size, lambda line: None, force=False)


@pytest.mark.parametrize("keys", [{}, {"pos_emb": "learned", "attention_backend": "sdpa"}])
def test_small_models_fit(tmp_path, keys, monkeypatch):
    check(tmp_path, **keys)
    monkeypatch.setattr(memory, "free_memory", lambda device="cpu": 10**5)
    with pytest.raises(UserError, match="per rank"):
        check(tmp_path, **keys)


@pytest.mark.parametrize(
    ("keys", "vocab_size", "message"),
    [
        # 2 * 10^9 * 32 parameters: 4 bytes, 4 bytes, 8 bytes
        ({}, 10**9, r"1,024\.0.*16\.0.*256\.0.*512\.0.*64,000.*64,000,000,000"),
        ({"hidden_size": 2**18}, 512, "hidden_size"),
        ({"pos_emb": "learned", "max_position_embeddings": 2**31}, 512, "68,719,476,736"),
        ({"train_batch_size": 10**9}, 512, "train_micro_batch_size_per_gpu: 1"),
        ({"seq_length": 2**31}, 512, "2,147,483,648.*seq_length"),
        ({"seq_length_val": 10**12}, 512, "activations"),
        ({"attention_backend": "flex"}, 512, "\"attention_backend\".*'flex'.*CPU"),
        ({"attention_backend": "fused"}, 512, "\"attention_backend\".*'fused'"),
    ],
)
def test_what_does_not_fit(tmp_path, keys, vocab_size, message, monkeypatch):
    monkeypatch.setattr("kerple.attention.backends.triton.launch._load_kernels", lambda: None)
    with pytest.raises(UserError, match=message):
        check(tmp_path, vocab_size=vocab_size, **keys)


def test_ranks_share_the_model(tmp_path):
    keys = {"hidden_size": 2**14, "num_layers": 8, "train_batch_size": 1}  # 8 * 12 * 2^28 parameters
    with pytest.raises(UserError, match="per rank"):
        check(tmp_path, **keys)
    check(tmp_path, dataclasses.replace(LAYOUT, world_size=64, pipeline_size=8, tensor_size=8), **keys)


def test_the_index_of_samples_must_fit():
    check_number_of_samples(10**9)
    with pytest.raises(UserError, match=r"2,000,000,000.*24\.0"):
        check_number_of_samples(2 * 10**9)
