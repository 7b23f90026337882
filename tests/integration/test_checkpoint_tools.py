"""tools/ckpts: converting, importing and inspecting checkpoints, and an exported model without this
project.
"""

import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import GPTNeoXForCausalLM

from kerple.attention import AttentionMode, Span
from kerple.positional.distance_maps import Clip
from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.storage import CheckpointError
from megatron.cli import convert, import_release, inspect, report
from megatron.cli.evaluate import main as evaluate_main
from megatron.cli.generate import main as generate_main
from megatron.config import Config, UserError, load_config
from megatron.convert import to_hugging_face
from megatron.inference import load_model
from megatron.tokenizer.hugging_face import train_bpe
from megatron.tokenizer.tokenizer import TokenizerFiles
from megatron.training.loop import train
from tests.support.archives import zip_of
from tests.support.checkpoints import write_checkpoint, write_corpus
from tests.support.conversion import LONG, greedy, make_model, quiet, random_tokens
from tests.support.errors import assert_rejected
from tests.support.families import family_model
from tests.support.release import checkpoints
from tests.support.runs import ROOT, environment, trained, unwrapped
from tests.support.texts import KINDS, PYTHON
from tools.datasets import preprocess_data

ALONE = """
import sys

class NoProject:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("kerple", "megatron"):
            raise ImportError(f"{name} was imported")

sys.meta_path.insert(0, NoProject())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

model = AutoModelForCausalLM.from_pretrained("model", trust_remote_code=True, dtype=torch.float32)
tokens = torch.load("tokens.pt")
with torch.no_grad():
    logits = model(tokens).logits
    in_mode = AutoModelForCausalLM.from_pretrained(
        "model", trust_remote_code=True, dtype=torch.float32, inference_mode="sinks@2+9+clip@8"
    )(tokens).logits
continued = model.generate(tokens, max_new_tokens=10, do_sample=False, eos_token_id=None)
tokenizer = AutoTokenizer.from_pretrained("model", trust_remote_code=True)
generator = pipeline("text-generation", model="model", trust_remote_code=True)
texts = ["def add(a, b):", "import", "x" * 100]
options = dict(max_new_tokens=8, do_sample=False, return_full_text=False)
one_by_one = [generator(text, **options)[0]["generated_text"] for text in texts]
batched = [batch[0]["generated_text"] for batch in generator(texts, batch_size=3, **options)]
ids = tokenizer(texts)["input_ids"]
results = dict(logits=logits, in_mode=in_mode, continued=continued)
results |= dict(ids=ids, texts=one_by_one, batched=batched)
torch.save(results, "out.pt")
"""


@pytest.mark.ci
@torch.no_grad()
def test_an_exported_model_needs_only_torch_and_transformers(tmp_path):
    """Loaded, run beyond the training length and used in a pipeline by a process that cannot import
    this project.
    """
    model, config = make_model("kerple_bias_wht")
    tokenizer = TokenizerFiles("CharLevelTokenizer")
    to_hugging_face(model, config, tmp_path / "model", tokenizer=tokenizer, report=quiet)
    tokens = random_tokens(2, LONG)
    torch.save(tokens, tmp_path / "tokens.pt")
    (tmp_path / "alone.py").write_text(ALONE)
    variables = {**environment(), "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    variables.pop("PYTHONPATH", None)
    command = [sys.executable, "alone.py"]
    finished = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=200
    )
    assert finished.returncode == 0, finished.stderr
    out = torch.load(tmp_path / "out.pt", weights_only=True)
    assert (out["logits"] - model(tokens)).abs().max() < 1e-4
    mode = AttentionMode(Span(window=9, sinks=2), distance_map=Clip(8))
    assert (out["in_mode"] - model(tokens, mode=mode)).abs().max() < 1e-4
    assert torch.equal(out["continued"], greedy(model, tokens, 10))
    assert out["ids"] == [list(text.encode()) for text in ("def add(a, b):", "import", "x" * 100)]
    assert out["batched"] == out["texts"]
    expected = greedy(model, torch.tensor([list(b"import")]), 8)[0, 6:].tolist()
    assert out["texts"][1] == bytes(
        min(token, 255) for token in expected if 0 < token < 256
    ).decode(errors="replace")


@pytest.fixture(scope="module")
def pythia(tmp_path_factory) -> tuple[Path, GPTNeoXForCausalLM, Tokenizer]:
    """A Pythia-like folder, its model and its tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("pythia"), train_bpe(KINDS.values(), 400)
    theirs = family_model(folder, "pythia", vocab_size=tokenizer.get_vocab_size())
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder, theirs, tokenizer


def test_import_finetune_and_export(pythia, tmp_path, capsys):
    """A Pythia-like folder -> ours, which generates -> finetuned, at a learning rate of 0 ->
    Hugging Face.
    """
    source, theirs, tokenizer = pythia
    convert.main(["from-hf", str(source), str(tmp_path / "ours")])
    assert "logits compared at length 32 and 128, largest" in capsys.readouterr().out
    prompts, texts = tmp_path / "prompts.txt", tmp_path / "texts.jsonl"
    prompts.write_text("def main(\n")
    checkpoint = ["--checkpoint", str(tmp_path / "ours")]
    generate_main([*checkpoint, "-i", str(prompts), "-o", str(texts), "--set", "maximum_tokens=8"])
    prompt = tokenizer.encode("def main(").ids
    expected = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None
    )
    assert json.loads(texts.read_text())["text"] == tokenizer.decode(
        expected[0, len(prompt) :].tolist()
    )

    _, config = load_model(tmp_path / "ours")
    run = {
        **{
            "load": str(tmp_path / "ours"),
            "finetune": True,
            "save": str(tmp_path / "run"),
            "save_interval": 2,
        },
        **{
            "data_path": write_corpus(tmp_path),
            "split": "8,1,1",
            "num_workers": 0,
            "eval_iters": 1,
        },
        **{"train_iters": 2, "lr_decay_iters": 2, "train_micro_batch_size_per_gpu": 4},
        "optimizer": {"type": "Adam", "params": {"lr": 0.0}},
    }
    train(Config.from_flat({**config.to_flat(), **run}))
    convert.main(
        ["to-hf", str(tmp_path / "run"), str(tmp_path / "mode"), "--inference-mode", "window@8"]
    )
    assert (
        json.loads((tmp_path / "mode" / "config.json").read_text())["inference_mode"] == "window@8"
    )
    convert.main(["to-hf", str(tmp_path / "run"), str(tmp_path / "back")])
    back = GPTNeoXForCausalLM.from_pretrained(tmp_path / "back").eval()
    tokens = random_tokens(1, LONG) % tokenizer.get_vocab_size()
    with torch.no_grad():
        assert (back(tokens).logits - theirs(tokens).logits).abs().max() < 1e-4


def test_training_with_another_method(pythia, tmp_path, capsys):
    """Import, tokenize, train on growing lengths, evaluate both."""
    documents = [PYTHON[start : start + 1000] for start in range(0, 12_000, 1000)]
    (tmp_path / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in documents)
    )
    ours, run = str(tmp_path / "ours"), str(tmp_path / "run")

    convert.main(["from-hf", str(pythia[0]), ours])
    arguments = ["--tokenizer-type", "HFTokenizer", "--vocab-file", f"{ours}/tokenizer.json"]
    arguments += ["--input", str(tmp_path / "corpus.jsonl"), "--append-eod"]
    arguments += ["--output-prefix", str(tmp_path / "data")]
    assert preprocess_data.main(arguments) in (None, 0)
    corpus = [f"data_path={tmp_path}/data_text_document", "split=2,1,0"]
    overrides = [*corpus, f"load={ours}", f"save={run}", "finetune=true", "pos_emb=kerple_log"]
    overrides += ["train_micro_batch_size_per_gpu=2", "train_batch_size=2", "train_iters=3"]
    overrides += ["eval_iters=1", "seq_length=32", "num_workers=0"]
    curriculum = {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 8,
        "max_difficulty": 32,
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [8, 32], "max_step": [1]},
    }
    overrides.append(f"curriculum_learning={json.dumps(curriculum)}")
    capsys.readouterr()
    config = load_config([f"{ours}/global_step0/configs/config.yml"], overrides=overrides)
    assert train(config).tokens == 2 * (8 + 32 + 32)
    log = unwrapped(capsys.readouterr().out)
    assert "the checkpoint's positional parameters are not used; those of kerple_log are new" in log
    assert "curriculum_learning: length 32 from iteration 2" in log

    options = ["--lengths", "32", "256", "--tokens", "512", "--set", *corpus]
    evaluate_main(["--checkpoint", ours, run, "--output", str(tmp_path / "results"), *options])
    lines = capsys.readouterr().err
    assert "rotary (fraction 0.25) full non-overlapping at 256: perplexity" in lines
    assert "kerple_log full non-overlapping at 256: perplexity" in lines


def test_continued_pretraining(pythia, tmp_path, monkeypatch):
    """The code of docs/huggingface.md, with a small model and 3 steps; then its commands."""
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(pythia[0], tmp_path / "pythia")
    # transformers adds a padding token to the tokenizer of a GPT-NeoX model otherwise.
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    text = (ROOT / "docs" / "huggingface.md").read_text()
    text = text[text.index("## Continued pre-training") :]
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    for large, small in {
        "EleutherAI/pythia-160m": "pythia",
        ", 2048\n": ", 32\n",
        "max_steps=1000": "max_steps=3, use_cpu=True",
        "accumulation_steps=32": "accumulation_steps=1",
    }.items():
        assert large in code
        code = code.replace(large, small)
    for name in ("train.txt", "test.txt"):
        Path(name).write_text(PYTHON[:8000])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # of training in this process
        monkeypatch.delenv(name, raising=False)
    exec(code, {})
    options = ["--text", "test.txt", "--lengths", "32", "128", "--output"]
    control = ["--checkpoint", "pythia", "runs/control", "--modes", "full", "window@32"]
    evaluate_main([*control, *options, "results/control"])
    kerple = ["--checkpoint", "runs/kerple", "--positional", "runs/kerple"]
    evaluate_main([*kerple, *options, "results/kerple"])
    control_name = "rotary (fraction 0.25) (control)"
    words = ["results/control", "results/kerple", "--output", "results"]
    report.main([*words, "--reference", control_name])
    (differences,) = Path("results/tables").glob("differences-*.md")
    assert "gpt_neox + kerple_log | " in differences.read_text()
    (table,) = Path("results/tables").glob("perplexity-*.md")
    rotary = "Rotary (fraction 0.25)"
    methods = [f"{rotary} (pythia)", f"{rotary} (control)", "gpt_neox + kerple_log"]
    values = {}
    for method in methods:  # in the first part, of full attention
        values[method] = table.read_text().split(f"| {method} | ")[1].split(" ")[0]
    lowest = min(values, key=lambda method: float(values[method].strip("*")))
    assert values[lowest].startswith("**")


@pytest.fixture
def changed_tokenizer(tmp_path) -> tuple[Path, dict[str, object]]:
    """A run whose tokenizer.json has lost its last merge since; the keys with which it resumes."""
    vocabulary = tmp_path / "tokenizer.json"
    train_bpe(KINDS.values(), 300).save(str(vocabulary))
    keys = {
        "tokenizer_type": "HFTokenizer",
        "vocab_file": str(vocabulary),
        "eval_iters": 0,
        "train_iters": 1,
    }
    data_path = write_corpus(tmp_path)
    trained(tmp_path, data_path, **keys)
    content = json.loads(vocabulary.read_text())
    content["model"]["merges"].pop()
    vocabulary.write_text(json.dumps(content))
    return tmp_path / "checkpoints", {**keys, "data_path": data_path, "train_iters": 2}


def test_a_changed_tokenizer_is_refused_by_commands(changed_tokenizer, tmp_path, capsys):
    checkpoint = str(changed_tokenizer[0])
    texts = {name: tmp_path / name for name in ("text.txt", "prompts.txt")}
    for path in texts.values():
        path.write_text("def main(x):\n")
    evaluate = ["--checkpoint", checkpoint, "--text", str(texts["text.txt"]), "--lengths", "8"]
    evaluate += ["--output", str(tmp_path / "results")]
    generate = [
        "--checkpoint",
        checkpoint,
        "-i",
        str(texts["prompts.txt"]),
        "-o",
        str(tmp_path / "out.jsonl"),
    ]
    generate += ["--set", "maximum_tokens=3"]
    export = ["to-hf", checkpoint, str(tmp_path / "hf")]
    for command, arguments in (
        (evaluate_main, evaluate),
        (generate_main, generate),
        (convert.main, export),
    ):
        assert_rejected("fingerprint.*allow_other_tokenizer", command, arguments)
    assert not any((tmp_path / name).exists() for name in ("results", "out.jsonl", "hf"))
    evaluate_main([*evaluate, "--set", "allow_other_tokenizer=true"])
    generate_main([*generate, "allow_other_tokenizer=true"])
    convert.main([*export, "--allow-other-tokenizer"])
    assert all((tmp_path / name).exists() for name in ("results", "out.jsonl", "hf"))


def test_a_changed_tokenizer_is_refused_by_training(changed_tokenizer, tmp_path):
    keys = changed_tokenizer[1]
    assert_rejected("global_step1: .*allow_other_tokenizer", trained, tmp_path, **keys)
    new = {**keys, "finetune": True, "save": str(tmp_path / "new")}
    assert_rejected("global_step1: .*allow_other_tokenizer", trained, tmp_path, **new)
    trained(tmp_path, **keys, allow_other_tokenizer=True)
    # The checkpoint now has the present tokenizer.
    trained(tmp_path, **{**keys, "train_iters": 3})
    vocabulary = Path(str(keys["vocab_file"]))
    vocabulary.write_text(vocabulary.read_text() + "\n")
    assert_rejected("global_step3: ", trained, tmp_path, **{**keys, "train_iters": 4})


def test_an_imported_checkpoint_has_a_tokenizer(pythia, tmp_path):
    convert.main(["from-hf", str(pythia[0]), str(tmp_path / "ours")])
    path = tmp_path / "ours" / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    assert_rejected(
        "allow_other_tokenizer",
        convert.main,
        ["to-hf", str(tmp_path / "ours"), str(tmp_path / "hf")],
    )
    convert.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "hf"), "--no-tokenizer"])


def test_an_error_leaves_no_files(tmp_path):
    write_checkpoint(tmp_path / "ours", "alibi", "nowhere", tokenizer_type="GPT2BPETokenizer")
    with pytest.raises(UserError, match=r"vocab-file.*--no-tokenizer"):
        convert.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "hf")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours"]


def zipped(source: Path, path: Path) -> Path:
    files = {
        f"released/{file.relative_to(source)}": file.read_bytes()
        for file in source.rglob("*")
        if file.is_file()
    }
    files["released/global_step300/"] = b""
    files["released/._latest"] = b"as macOS adds for every file"
    files["released/global_step300/._layer_02-model_00-model_states.pt"] = b""
    path.write_bytes(zip_of(files))
    return path


def test_a_released_archive(tmp_path, capsys):
    """The JSON report of an archive with the release's own files; the model is loaded from the
    folder in the report.
    """
    archive = zipped(checkpoints("kerple_log"), tmp_path / "log.zip")
    import_release.main([str(archive), "-o", str(tmp_path / "log"), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert read_manifest(Path(report["load"]) / "global_step300") is not None
    model, _ = load_model(report["load"])
    assert report["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert report["positional_parameters"] == 8
    assert (report["iteration"], report["pos_emb"], report["optimizer"]) == (
        300,
        "kerple_log",
        "the release's",
    )
    (kernels,) = report["kernels"].values()
    state = torch.load(
        checkpoints("kerple_log") / "global_step300" / "layer_02-model_00-model_states.pt"
    )
    for name in ("bias_p", "bias_a"):
        assert kernels[name] == pytest.approx(state[f"attention.rpe.{name}"].flatten().tolist())
    for length, p, a in zip(
        kernels["effective_length"], kernels["bias_p"], kernels["bias_a"], strict=True
    ):
        bias = [-p * torch.tensor(1 + a * distance).log() for distance in (length - 1, length)]
        assert length == 20480 or (bias[0] >= -2 > bias[1])


def test_the_report_names_the_folder_to_load(tmp_path, capsys):
    write_checkpoint(tmp_path / "ours", "alibi", "nowhere")
    archive = tmp_path / "ours.tar.gz"
    with tarfile.open(archive, "w:gz") as opened:
        opened.add(tmp_path / "ours", "deep/er")
    import_release.main([str(archive), "-o", str(tmp_path / "out")])
    assert f"load={tmp_path / 'out' / 'deep' / 'er'}" in capsys.readouterr().out


@pytest.mark.parametrize("step", ["global_step300", "global_step200"])
def test_a_rejected_archive_leaves_no_files(step, tmp_path, monkeypatch):
    """Whether the damage is in the latest checkpoint or in an earlier one."""
    shutil.copytree(checkpoints("alibi"), tmp_path / "source")
    path = tmp_path / "source" / step / "layer_03-model_00-model_states.pt"
    path.parent.mkdir(exist_ok=True)
    state = torch.load(tmp_path / "source" / "global_step300" / path.name, weights_only=True)
    state["mlp.dense_h_to_4h.weight"][3, 4] = float("nan")
    torch.save(state, path)
    monkeypatch.chdir(tmp_path)
    assert_rejected(
        path.name, import_release.main, [str(zipped(tmp_path / "source", tmp_path / "bad.zip"))]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.zip", "source"]


def test_a_flipped_bit_in_a_plain_tar(tmp_path, monkeypatch):
    """A tar file has no checksums, but the files of torch in it do."""
    shutil.copytree(checkpoints("alibi"), tmp_path / "source")
    path = tmp_path / "source/global_step300/layer_03-model_00-model_states.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 2  # in a weight
    path.write_bytes(content)
    with tarfile.open(tmp_path / "bad.tar", "w") as opened:
        opened.add(tmp_path / "source", "released")
    monkeypatch.chdir(tmp_path)
    assert_rejected(f"{path.name}.*checksum", import_release.main, ["bad.tar"])


def run_inspect(capsys, *arguments):
    status = inspect.main([*map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_a_checkpoint_of_this_project(default_run, tmp_path, monkeypatch, capsys):
    ours = default_run / "checkpoints"
    status, report = run_inspect(capsys, ours)
    assert status == 0
    assert report["manifest"] == "whole"
    assert report["training"]["consumed_samples"] == 48
    assert report["dtypes"] == ["float32"]
    assert report["optimizer"] == "per parameter, in 1 file"
    assert report["shape"]["zero_stage"] == 0
    assert run_inspect(capsys, ours, "--iteration", 3)[1]["iteration"] == 3
    assert run_inspect(capsys, ours / "global_step3")[1]["iteration"] == 3
    (tmp_path / "best").symlink_to(ours / "global_step3")
    assert run_inspect(capsys, tmp_path / "best")[1]["iteration"] == 3
    monkeypatch.chdir(ours / "global_step3")
    assert run_inspect(capsys, ".")[1]["iteration"] == 3
    assert inspect.main([str(ours)]) == 0
    printed = capsys.readouterr().out
    for part in (
        "manifest        whole",
        "1 tensor parallel",
        "bias_p",
        "effective_length",
        "samples read    48",
    ):
        assert part in printed


def test_damage_is_reported(finished_run, tmp_path, capsys):
    file = tmp_path / "checkpoints/global_step6/optimizer_rank_00000.pt"
    data = bytearray(file.read_bytes())
    data[-200] ^= 4
    file.write_bytes(data)
    status, report = run_inspect(capsys, tmp_path / "checkpoints")
    assert status == 1
    assert "optimizer_rank_00000.pt: contents" in report["manifest"]


def test_a_lost_manifest_is_reported_and_accepted(finished_run, tmp_path, capsys):
    ours = tmp_path / "checkpoints"
    step = ours / "global_step6"
    (step / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json.*--accept.*3"):
        load_model(ours)
    status, report = run_inspect(capsys, ours)
    assert status == 1
    assert "manifest.json: no such file" in report["manifest"]
    # Also for a run that saves neither optimizer nor random states.
    for file in [*step.glob("optimizer_*"), *step.glob("random_*")]:
        file.unlink()
    assert run_inspect(capsys, ours)[0] == 1
    assert run_inspect(capsys, ours, "--accept")[1]["manifest"] == "whole"
    load_model(ours)
    (step / "optimizer_rank_00000.pt").write_bytes(b"of another run")
    with pytest.raises(CheckpointError, match=r"optimizer_rank_00000\.pt"):
        load_model(ours)
    with pytest.raises(CheckpointError, match="is not in the manifest"):
        run_inspect(capsys, ours, "--accept")
