"""The commands in GPT-NeoX's README, on a small model and small datasets."""

import json
import os
import shutil
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zstandard
from transformers import AutoTokenizer, GPTNeoXForCausalLM

from megatron.config.yaml_files import read_file
from megatron.preparation import prepare
from megatron.tokenizer.hugging_face import train_bpe
from tests.support.archives import zip_of
from tests.support.commands import make_checkout, run_here
from tests.support.corpora import json_lines
from tests.support.harness_tasks import use_offline_harness, write_tasks
from tests.support.runs import ROOT
from tests.support.servers import serve
from tests.support.texts import KINDS, PYTHON

SMALL = {
    "num-layers": 1,
    "hidden-size": 32,
    "num-attention-heads": 4,
    "seq-length": 64,
    "max-position-embeddings": 64,
    "train-iters": 2,
    "lr-decay-iters": 2,
    "eval-iters": 1,
    "checkpoint-factor": 2,
}
PREPARE = "python prepare_data.py -d ./data"
PREPROCESS = """python tools/datasets/preprocess_data.py --input ./data/mydataset.jsonl.zst \
    --output-prefix ./data/mydataset --vocab ./data/gpt2-vocab.json --merge-file gpt2-merges.txt --dataset-impl mmap \
    --tokenizer-type GPT2BPETokenizer --append-eod"""  # noqa: E501
PREPARE_PILE = (
    "python prepare_data.py -d ./data -t HFTokenizer --vocab-file "
    "./20B_checkpoints/20B_tokenizer.json pile_subset"
)
TRAIN = (
    "python ./deepy.py train.py -d configs 125M.yml local_setup.yml --wandb_group example "
    "--wandb_team team"
)
GENERATE = "python ./deepy.py generate.py -d configs 125M.yml local_setup.yml text_generation.yml"
GENERATE_FROM_FILE = (
    f"{GENERATE} --sample_input_file input_prompt.txt --sample_output_file prompt_out.txt"
)
EVALUATE = (
    "python ./deepy.py eval.py -d configs 125M.yml local_setup.yml --eval_tasks tasks/choices.yaml"
)
CHECKPOINTS = "runs/local/rotary/1234/checkpoints"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A checkout whose configs/125M.yml has the same keys as the real one, and smaller values."""
    folder = make_checkout(tmp_path_factory.mktemp("neox"), "configs")
    (folder / "configs").mkdir()
    shutil.copy(ROOT / "configs" / "local_setup.yml", folder / "configs")
    generation = {
        entry.key: entry.value for entry in read_file(ROOT / "configs" / "text_generation.yml")
    }
    assert generation.keys() >= {"num_samples", "maximum_tokens"}
    few = {**generation, "num_samples": 2, "maximum_tokens": 8}
    (folder / "configs" / "text_generation.yml").write_text(json.dumps(few))
    keys = {entry.key: entry.value for entry in read_file(ROOT / "configs" / "125M.yml")}
    assert keys.keys() >= SMALL.keys()
    keys["fp16"] = {**keys["fp16"], "initial_scale_power": 8}  # otherwise both steps are skipped
    (folder / "configs" / "125M.yml").write_text(json.dumps({**keys, **SMALL}))
    # The files that README's text says to download.
    shutil.copy(folder / "data" / "gpt2-merges.txt", folder)
    (folder / "20B_checkpoints").mkdir()
    train_bpe(KINDS.values(), 600).save(str(folder / "20B_checkpoints" / "20B_tokenizer.json"))
    (folder / "data" / "mydataset.jsonl.zst").write_bytes(
        zstandard.compress(json_lines("one", "two"))
    )
    (folder / "input_prompt.txt").write_text("def main(\nimport\n")
    (folder / "tasks").mkdir()
    write_tasks(folder / "tasks")
    served = folder / "served" / "http:" / "mattmahoney.net" / "dc"
    served.mkdir(parents=True)
    (served / "enwik8.zip").write_bytes(zip_of({"enwik8": PYTHON[:20_000].encode()}))
    return folder


def check_generated(path: Path, contexts: list[str]) -> None:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["context"] for record in records] == contexts
    assert all(0 < record["length"] <= 8 for record in records)


def check_converted(folder: Path, dtype: torch.dtype) -> None:
    model = GPTNeoXForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == dtype
    assert (model.config.num_hidden_layers, model.config.hidden_size, model.config.vocab_size) == (
        1,
        32,
        50304,
    )
    assert AutoTokenizer.from_pretrained(folder)("Hello world")["input_ids"] == [15496, 995]


def test_deepy_is_executable():
    assert os.access(ROOT / "deepy.py", os.X_OK)
    assert (ROOT / "deepy.py").read_text().startswith("#!/usr/bin/env python\n")


@pytest.mark.ci
def test_commands_in_this_process(checkout, tmp_path, monkeypatch, capsys):
    use_offline_harness(monkeypatch, tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with serve(checkout / "served") as address:
        monkeypatch.setenv("http_proxy", address)
        monkeypatch.setattr(urllib.request, "_opener", None)  # reads http_proxy again
        enwik8 = prepare.KNOWN_DATASETS["enwik8"]
        assert enwik8.url is not None
        without_checksum = replace(enwik8, url=enwik8.url.partition("#")[0])
        monkeypatch.setitem(prepare.KNOWN_DATASETS, "enwik8", without_checksum)
        run_here(PREPARE, checkout, monkeypatch)
        monkeypatch.delenv("http_proxy")
        monkeypatch.setattr(urllib.request, "_opener", None)
        (checkout / "served" / "00.jsonl.zst").write_bytes(
            zstandard.compress(json_lines("import os", "return"))
        )
        pile = prepare.KNOWN_DATASETS["pile_subset"]
        monkeypatch.setitem(
            prepare.KNOWN_DATASETS, "pile_subset", replace(pile, url=f"{address}/00.jsonl.zst")
        )
        run_here(PREPARE_PILE, checkout, monkeypatch)
    run_here(PREPROCESS, checkout, monkeypatch)
    data = checkout / "data"
    for name in ("enwik8/enwik8", "mydataset", "pile_subset/pile_subset"):
        assert (data / f"{name}_text_document.bin").is_file()
        assert (data / f"{name}_text_document.idx").is_file()

    run_here(TRAIN, checkout, monkeypatch)
    assert "iteration 2/2" in capsys.readouterr().out
    saved = (checkout / CHECKPOINTS / "global_step2" / "configs" / "config.yml").read_text()
    assert json.loads(saved)["wandb_group"] == "example"
    run_here(GENERATE_FROM_FILE, checkout, monkeypatch)
    check_generated(checkout / "prompt_out.txt", ["def main("] * 2 + ["import"] * 2)
    run_here(EVALUATE, checkout, monkeypatch)
    assert "choices" in capsys.readouterr().out
    run_here(
        f"python kerple_command.py convert to-hf {CHECKPOINTS} hf_model", checkout, monkeypatch
    )
    check_converted(checkout / "hf_model", torch.float16)  # as trained
