"""The files in GPT-NeoX's configs/ (HEAD of May 2026): which ones load, and why the others are
rejected.
"""

import re

import pytest
import torch
import yaml

from megatron.config import Config, UserError
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings
from tests.support.runs import ROOT

FILES = yaml.safe_load((ROOT / "tests" / "data" / "neox_configs.yml").read_text())
SHARED, LOADED, LLAMA_FILES, REJECTED = (
    FILES[name] for name in ("shared", "loaded", "llama", "rejected")
)


@pytest.mark.parametrize("name", LOADED)
def test_loaded(name):
    config = Config.from_flat({**SHARED, **LOADED[name]}, source=name)
    notices = [notice for notice in config.notices if " is ignored: " not in notice]
    # Without use_wandb, GPT-NeoX logs if there is an API key.
    idle = ["wandb_group", "wandb_team"] if name == "eleutherai_cluster" else []
    assert [notice.split()[0] for notice in notices] == idle
    assert config.checkpoint.saves(0) == name.startswith(("pythia", "docker", "finetuning"))


def llama_config(name: str) -> Config:
    keys = LLAMA_FILES[name]
    shared = {
        key: value for key, value in SHARED.items() if key != "warmup" or "warmup_iters" not in keys
    }
    return Config.from_flat({**shared, **keys}, source=name)


@pytest.mark.parametrize("name", LLAMA_FILES)
def test_llama_s_files(name):
    keys, features = LLAMA_FILES[name], FILES["features"][name]
    config = llama_config(name)
    model = config.model
    assert model.mlp_features == features
    assert model.num_kv_heads == keys.get("num_kv_heads", model.num_attention_heads)
    assert model.window == (4097 if name == "mistral/7B" else None)
    assert (model.use_bias_in_norms, model.use_bias_in_attn_linear) == (False, False)
    notices = [notice for notice in config.notices if " is ignored: " not in notice]
    smaller = features < 2 * model.hidden_size
    assert smaller == name.startswith(("llama2/codellama", "llemma", "mistral"))
    assert [
        f"the gated MLP has {features:,} features, a third of" in notice for notice in notices
    ] == [True] * smaller


def test_llama_s_sizes():
    """Parameters of Llama 7B, and of Llama 2 70B plus the biases of the MLP, which llama2's files
    do not turn off.
    """
    biases = 80 * (2 * 28672 + 8192)
    for name, expected in (("llama/7B", 6_738_415_616), ("llama2/70B", 68_976_648_192 + biases)):
        settings = ModelSettings(llama_config(name).model, padded_vocab_size=32_000)
        with torch.device("meta"):
            assert sum(parameter.numel() for parameter in GPT(settings).parameters()) == expected


def test_llemma_s_schedule():
    schedule = llama_config("llemma/7B").schedule
    assert (schedule.lowest_lr(1e-4), schedule.warmup_steps(320_000)) == (
        pytest.approx(3.3e-6),
        500,
    )


@pytest.mark.parametrize("name", REJECTED)
def test_rejected(name):
    expected = FILES["reported"][name]
    with pytest.raises(UserError) as caught:
        Config.from_flat({**SHARED, **REJECTED[name]}, source=name)
    lines = str(caught.value).splitlines()[1 if len(expected) > 1 else 0 :]
    found = [re.match(rf'\s*({re.escape(name)}: )?"?([\w.]+)', line)[2] for line in lines]
    assert sorted(found) == sorted(expected)


def test_every_file_is_in_one_table():
    assert (len(LOADED), len(LLAMA_FILES), len(REJECTED)) == (38, 12, 14)
    assert len(LOADED | LLAMA_FILES | REJECTED) == 64
