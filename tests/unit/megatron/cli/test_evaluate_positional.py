"""evaluate.py --positional: losses of models of transformers with methods of use_positional."""

import itertools
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kerple.transformers import load_positional, save_positional, use_positional
from megatron.cli.evaluate import main
from megatron.convert.tokenizer_files import write_tokenizer
from megatron.evaluation import evaluate_extrapolation
from megatron.evaluation.records import read_results
from megatron.tokenizer.tokenizer import TokenizerFiles
from tests.support.errors import assert_rejected

TEXT = "The kernel decays with the distance of the tokens. " * 20
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with a tokenizer, and the folders of three methods."""
    folder = tmp_path_factory.mktemp("hf")
    (folder / "text.txt").write_text(TEXT)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    model.save_pretrained(folder / "llama")
    write_tokenizer(TokenizerFiles("CharLevelTokenizer"), folder / "llama", 512)
    for name, own in (("kerple_log", "keep"), ("alibi", "remove")):
        use_positional(model, name, own_positions=own)
        save_positional(model, folder / name)
    use_positional(model, "kerple_log", own_positions="keep")
    with torch.no_grad():
        for parameter in model.kerple_positional.parameters():
            parameter.add_(1)
    save_positional(model, folder / "trained")
    model.save_pretrained(folder / "complete")
    shutil.copy(folder / "llama" / "tokenizer.json", folder / "complete")
    return folder


def evaluate(folder, *words, methods=("none", "kerple_log", "alibi"), checkpoint="llama"):
    adapters = [name if name == "none" else str(folder / name) for name in methods]
    options = ["--text", str(folder / "text.txt"), "--lengths", "32", "96"]
    options += ["--output", str(folder / "report"), *words]
    main(["--checkpoint", str(folder / checkpoint), "--positional", *adapters, *options])
    return read_results(folder / "report")


def test_the_command_of_the_page(folder, tmp_path, monkeypatch):
    """That of docs/transformers.md, with a tiny model."""
    page = (Path(__file__).resolve().parents[4] / "docs" / "transformers.md").read_text()
    (block,) = re.findall(r"```bash\n(kerple evaluate.*?)```", page, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder / "llama", "FOLDER")
    shutil.copytree(folder / "kerple_log", "adapter")
    Path("book.txt").write_text(TEXT * 10)
    _, _, *words = shlex.split(block.replace("\\\n", ""))
    main(words)
    found = {(record["pos_emb"], record["length"]) for record in read_results(Path("report"))}
    assert found == set(itertools.product(("llama", "llama + kerple_log"), (512, 2048, 8192)))


def losses_of(model, length):
    """Of the tokens in complete segments of the longest length, by the model's own forward pass."""
    tokens = torch.tensor([*TEXT.encode(), 0])
    scored = (len(tokens) - 1) // 96 * 96
    starts = torch.arange(0, scored, length)
    rows = tokens[starts[:, None] + torch.arange(length + 1)]
    logits = model(rows[:, :-1], use_cache=False).logits.double()
    picked = torch.log_softmax(logits, -1).gather(-1, rows[:, 1:, None])
    return -picked.mean().item()


@pytest.mark.ci
def test_losses_and_names(folder, capsys):
    records = evaluate(folder)
    found = {(record["pos_emb"], record["length"]): record for record in records}
    labels = {"none": "llama", "kerple_log": "llama + kerple_log", "alibi": "alibi"}
    for adapter, name in labels.items():
        model = AutoModelForCausalLM.from_pretrained(folder / "llama").eval()
        if adapter != "none":
            load_positional(model, folder / adapter)
        for length in (32, 96):
            with torch.no_grad():
                expected = losses_of(model, length)
            assert found[name, length]["loss"] == pytest.approx(expected, abs=2e-6)
    assert len(found) == 6
    assert "llama + kerple_log" in (folder / "report" / "extrapolation.md").read_text()

    # What is stored is not measured again, unless the method changes.
    capsys.readouterr()
    evaluate(folder)
    assert "perplexity" not in capsys.readouterr().err
    model = AutoModelForCausalLM.from_pretrained(folder / "llama")
    use_positional(model, "alibi", own_positions="keep")
    save_positional(model, folder / "alibi")
    names = {record["pos_emb"] for record in evaluate(folder, "--replace")}
    assert names == {"llama", "llama + kerple_log", "llama + alibi"}


def test_a_model_whose_weights_are_missing(folder, tmp_path):
    """transformers would initialize them at random, and only warn."""
    shutil.copytree(folder / "llama", folder / "deeper", dirs_exist_ok=True)
    config = json.loads((folder / "deeper" / "config.json").read_text())
    (folder / "deeper" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert_rejected(r"deeper.*layers\.2", evaluate, folder, checkpoint="deeper")


def test_a_model_without_the_method_that_it_was_saved_with(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "complete")
    tokens = torch.tensor([*TEXT.encode()])
    assert_rejected("load_positional", evaluate_extrapolation, model, tokens, [32], train_length=32)
    load_positional(model, folder / "complete")
    assert evaluate_extrapolation(model, tokens, [32], train_length=32)


def test_an_adapter_of_another_model(folder, capsys):
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    use_positional(model, "sandwich")
    save_positional(model, folder / "foreign")
    evaluate(folder, "--replace", methods=["foreign", "alibi"])
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1
    assert "foreign" in notes[0]


def test_an_adapter_that_is_not_finite(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "llama")
    use_positional(model, "kerple_log")
    with torch.no_grad():
        next(model.kerple_positional.parameters()).fill_(float("nan"))
    save_positional(model, folder / "nan")
    assert_rejected("nan.*bias", evaluate, folder, methods=["nan"])


@pytest.mark.parametrize(
    ("message", "words", "keywords"),
    [
        ("--modes", ["--modes", "window@8"], {}),
        ("--iteration, --split", ["--iteration", "3", "--split", "test"], {}),
        ("2 labels for 3", ["--label", "a", "b"], {}),
        ("missing", [], {"methods": ["missing"]}),
        ("--checkpoint too", [], {"methods": ["complete"]}),
        ("config.json", [], {"checkpoint": "kerple_log"}),
        ("complete.*not none", [], {"checkpoint": "complete"}),
        ("two checkpoints", ["--replace"], {"methods": ["kerple_log", "trained"]}),
    ],
    ids=str,
)
def test_what_does_not_fit(folder, message, words, keywords):
    assert_rejected(message, evaluate, folder, *words, **keywords)


def test_a_tokenizer_with_more_ids_than_the_model(folder):
    """Otherwise the records say that the text is too long."""
    shutil.copytree(folder / "llama", folder / "small")
    sizes = {**SIZES, "vocab_size": 64}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))
    model.save_pretrained(folder / "small")
    message = "token id .* is outside the vocabulary of 64"
    assert_rejected(message, evaluate, folder, checkpoint="small", methods=["none"])
