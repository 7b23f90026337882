"""Configurations for the user's own text."""

import itertools
import re

import pytest
import torch

from megatron.cli import init
from megatron.config import load_config
from megatron.preparation.prepare import PrepareOptions, prepare
from megatron.sweep.definition import read_sweep
from tests.support.errors import assert_rejected


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """A function that prepares `size` bytes of text as data/mytext in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def prepare_text(size, **options):
        lines = (f"{number * number} is the square of {number}.\n\n" for number in range(10**6))
        text = "".join(line for line, _ in zip(lines, range(size // 30), strict=False))
        (tmp_path / "text.md").write_text(text)
        prepare(
            PrepareOptions(
                "mytext", sources=("text.md",), rebuild=True, **(options or {"vocab_size": 300})
            )
        )

    return prepare_text


def test_files(dataset, tmp_path, monkeypatch, capsys):
    dataset(150_000)
    for has_bf16, precision in ((False, "fp32"), (True, "bfloat16")):
        monkeypatch.setattr(init, "has_bf16_instructions", lambda has_bf16=has_bf16: has_bf16)
        for path in tmp_path.glob("*.yml"):
            path.unlink()
        init.main(["mytext"])
        assert load_config(["mytext.yml"]).precision.precision == precision
    output = capsys.readouterr().out
    assert "kerple train mytext.yml pos_emb/kerple_log.yml\n" in output
    assert "kerple sweep mytext-sweep.yml\n" in output
    sweep = read_sweep("mytext-sweep.yml")
    configs = [sweep.configuration(choices) for choices in sweep.combinations()]
    runs = itertools.product(("kerple_log", "alibi"), (1234, 1235))
    assert [(config.model.pos_emb, config.training.seed) for config in configs] == list(runs)
    config = load_config(["mytext.yml", "pos_emb/kerple_log.yml"])
    text = (tmp_path / "mytext.yml").read_text()
    train_tokens = int(re.search(r"for ([\d,]+) tokens of training text", text)[1].replace(",", ""))
    assert "{\n" not in text
    assert '"num-layers"' not in text
    assert config.schedule.lr_decay_iters is None  # the decay ends with training
    assert config.optimizer.lr == 2e-3
    steps = config.schedule.train_iters
    assert steps == min(600, 4 * train_tokens // 2048)
    assert config.data.split == "80,10,10"
    lengths = config.evaluation.lengths
    assert lengths[0] == config.model.seq_length == 128
    assert 4 * lengths[-1] <= train_tokens / 8 < 8 * lengths[-1] or len(lengths) == 5
    assert config.evaluation.tokens % lengths[-1] == 0
    assert sweep.evaluation == (("--by-position",),)


def test_sizes_for_a_gpu(dataset, monkeypatch):
    dataset(150_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(init, "machine", lambda: "a GPU")
    tokens = [100_000_000, 10_000_000, 10_000_000]
    monkeypatch.setattr(init, "_split_tokens", lambda files: tokens)
    init.main(["mytext"])
    config = load_config(["mytext.yml"])
    assert (config.model.num_layers, config.model.hidden_size, config.model.seq_length) == (
        8,
        512,
        256,
    )
    assert config.schedule.train_iters == 5000
    assert config.evaluation.lengths == (256, 512, 1024, 2048, 4096)


def test_errors(dataset, tmp_path):
    assert_rejected("data/mytext/mytext_text_document", init.main, ["mytext"])
    dataset(10_000)
    assert_rejected("25,600.*512", init.main, ["mytext"])
    dataset(150_000, tokenizer_type="CharLevelTokenizer")
    assert_rejected("not tokenized with .*data/mytext/tokenizer.json", init.main, ["mytext"])
    (tmp_path / "data/mytext/tokenizer.json").unlink()
    assert_rejected("not tokenized with .*data/mytext/tokenizer.json", init.main, ["mytext"])
    dataset(10_000)
    assert not list(tmp_path.glob("*.yml"))
    (tmp_path / "mytext-sweep.yml").write_text("mine")
    assert_rejected(r"mytext-sweep\.yml", init.main, ["mytext"])
    assert [path.name for path in tmp_path.glob("*.yml")] == ["mytext-sweep.yml"]
