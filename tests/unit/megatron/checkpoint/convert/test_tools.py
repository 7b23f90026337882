"""The tools, and exported models where this project is not installed."""

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from megatron.checkpoint.convert import to_hugging_face
from megatron.checkpoint.convert.tokenizer_files import TokenizerFiles
from megatron.checkpoint.directory import find_damage, read_manifest
from megatron.cli.evaluate import main as evaluate_main
from megatron.cli.generate import main as generate_main
from megatron.config import Config, UserError
from megatron.inference import load_model
from megatron.tokenizer.hugging_face import train_bpe
from megatron.training.loop import train
from tests.support.checkpoints import write_checkpoint, write_corpus
from tests.support.conversion import LONG, greedy, make_model, quiet, random_tokens
from tests.support.release import checkpoints
from tests.support.runs import ROOT, environment
from tests.support.texts import KINDS, PYTHON
from tools.ckpts import convert, import_release

ALONE = """
import sys

class NoProject:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "megatron":
            raise ImportError(f"{name} was asked for")

sys.meta_path.insert(0, NoProject())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

model = AutoModelForCausalLM.from_pretrained("model", trust_remote_code=True, dtype=torch.float32)
tokens = torch.load("tokens.pt")
with torch.no_grad():
    logits = model(tokens).logits
made = model.generate(tokens, max_new_tokens=10, do_sample=False, eos_token_id=None)
tokenizer = AutoTokenizer.from_pretrained("model", trust_remote_code=True)
generator = pipeline("text-generation", model="model", trust_remote_code=True)
texts = ["def add(a, b):", "import", "x" * 100]
options = dict(max_new_tokens=8, do_sample=False, return_full_text=False)
one_by_one = [generator(text, **options)[0]["generated_text"] for text in texts]
batched = [made[0]["generated_text"] for made in generator(texts, batch_size=3, **options)]
ids = tokenizer(texts)["input_ids"]
torch.save(dict(logits=logits, made=made, ids=ids, texts=one_by_one, batched=batched), "out.pt")
"""


@torch.no_grad()
def test_an_exported_model_stands_alone(tmp_path):
    """Loaded, run beyond the training length and used in a pipeline by a process that cannot import this project."""
    model, config = make_model("kerple_bias_wht")
    tokenizer = TokenizerFiles("CharLevelTokenizer")
    to_hugging_face(model, config, tmp_path / "model", tokenizer=tokenizer, report=quiet)
    tokens = random_tokens(2, LONG)
    torch.save(tokens, tmp_path / "tokens.pt")
    (tmp_path / "alone.py").write_text(ALONE)
    variables = {**environment(), "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    variables.pop("PYTHONPATH", None)
    command = [sys.executable, "alone.py"]
    finished = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=200)
    assert finished.returncode == 0, finished.stderr
    out = torch.load(tmp_path / "out.pt", weights_only=True)
    assert (out["logits"] - model(tokens)).abs().max() < 1e-4
    assert torch.equal(out["made"], greedy(model, tokens, 10))
    assert out["ids"] == [list(text.encode()) for text in ("def add(a, b):", "import", "x" * 100)]
    assert out["batched"] == out["texts"]
    expected = greedy(model, torch.tensor([list(b"import")]), 8)[0, 6:].tolist()
    assert out["texts"][1] == bytes(min(token, 255) for token in expected if 0 < token < 256).decode(errors="replace")


def tool(name: str, *arguments: object, status: int = 0) -> str:
    """Run a tool as a user does; returns what it printed, the error output if it should fail."""
    command = [sys.executable, str(ROOT / "tools" / "ckpts" / name), *map(str, arguments)]
    finished = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200)
    assert finished.returncode == status, finished.stdout + finished.stderr
    return finished.stderr if status else finished.stdout


def test_there_and_back_and_trained_in_between(tmp_path, capsys):
    """A Pythia-like folder -> ours -> finetuned, at a learning rate of 0 -> Hugging Face."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    theirs = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, intermediate_size=128, max_position_embeddings=32)).eval()
    theirs.save_pretrained(tmp_path / "pythia")
    train_bpe(KINDS.values(), 400).save(str(tmp_path / "pythia" / "tokenizer.json"))
    convert.main(["from-hf", str(tmp_path / "pythia"), str(tmp_path / "ours")])
    assert "logits compared at length 32 and 128, largest" in capsys.readouterr().out

    _, config = load_model(tmp_path / "ours")
    run = {
        **{"load": str(tmp_path / "ours"), "finetune": True, "save": str(tmp_path / "run"), "save_interval": 2},
        **{"data_path": write_corpus(tmp_path), "split": "8,1,1", "num_workers": 0, "eval_iters": 1},
        **{"train_iters": 2, "lr_decay_iters": 2, "train_micro_batch_size_per_gpu": 4},
        "optimizer": {"type": "Adam", "params": {"lr": 0.0}},
    }
    train(Config.from_flat({**config.to_flat(), **run}))
    convert.main(["to-hf", str(tmp_path / "run"), str(tmp_path / "back")])
    back = GPTNeoXForCausalLM.from_pretrained(tmp_path / "back").eval()
    tokens = random_tokens(1, LONG)
    with torch.no_grad():
        assert (back(tokens).logits - theirs(tokens).logits).abs().max() < 1e-4


def test_an_imported_folder_is_evaluated_and_generates(tmp_path):
    """from-hf, and then the two scripts on the folder that it wrote, with the tokenizer that came along."""
    tokenizer = train_bpe(KINDS.values(), 400)
    sizes = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    theirs = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, intermediate_size=128, max_position_embeddings=32)).eval()
    theirs.save_pretrained(tmp_path / "pythia")
    tokenizer.save(str(tmp_path / "pythia" / "tokenizer.json"))
    convert.main(["from-hf", str(tmp_path / "pythia"), str(tmp_path / "ours")])
    assert find_damage(tmp_path / "ours" / "global_step0") is None
    assert read_manifest(tmp_path / "ours" / "global_step0") is not None

    folder = ["--checkpoint", str(tmp_path / "ours")]
    prompts, texts = tmp_path / "prompts.txt", tmp_path / "texts.jsonl"
    prompts.write_text("def main(\n")
    generate_main([*folder, "-i", str(prompts), "-o", str(texts), "--set", "maximum_tokens=8"])
    prompt = tokenizer.encode("def main(").ids
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert json.loads(texts.read_text())["text"] == tokenizer.decode(expected[0, len(prompt) :].tolist())

    corpus = [f"data_path={write_corpus(tmp_path)}", "split=8,1,1"]
    evaluate_main([*folder, "--output", str(tmp_path / "report"), "--lengths", "32", "128", "--set", *corpus])
    rows = json.loads((tmp_path / "report" / "extrapolation.json").read_text())["rows"]
    assert [(row["pos_emb"], row["length"]) for row in rows] == [
        ("rotary (fraction 0.25)", 32),
        ("rotary (fraction 0.25)", 128),
    ]


def test_errors_of_the_tool_are_one_line(tmp_path):
    write_checkpoint(tmp_path / "ours", "alibi", "nowhere", tokenizer_type="GPT2BPETokenizer")
    error = tool("convert.py", "to-hf", tmp_path / "ours", tmp_path / "hf", status=2)
    message = [line for line in error.splitlines() if line.startswith("error:")]
    assert len(message) == 1
    assert "needs vocab-file" in message[0]
    assert "--no-tokenizer" in message[0]
    assert not (tmp_path / "hf").exists()


def zipped(source: Path, path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as opened:
        for file in source.rglob("*"):
            opened.write(file, Path("released") / file.relative_to(source))
    return path


def test_a_released_archive(tmp_path):
    """The report, as JSON, of an archive of the release's own files; the folder is then loaded from where it says."""
    archive = zipped(checkpoints("kerple_log"), tmp_path / "log.zip")
    report = json.loads(tool("import_release.py", archive, "-o", tmp_path / "log", "--json"))
    assert read_manifest(Path(report["load"]) / "global_step300") is not None
    model, _ = load_model(report["load"])
    assert report["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert report["positional_parameters"] == 8
    assert (report["iteration"], report["pos_emb"], report["optimizer"]) == (300, "kerple_log", True)
    (kernels,) = report["kernels"].values()
    state = torch.load(checkpoints("kerple_log") / "global_step300" / "layer_02-model_00-model_states.pt")
    for name in ("bias_p", "bias_a"):
        assert kernels[name] == pytest.approx(state[f"attention.rpe.{name}"].flatten().tolist())
    for length, p, a in zip(kernels["effective_length"], kernels["bias_p"], kernels["bias_a"], strict=True):
        bias = [-p * torch.tensor(1 + a * distance).log() for distance in (length - 1, length)]
        assert length == 20480 or (bias[0] >= -2 > bias[1])
    # Its vocabulary of 128 is less than that of the tokenizer which its configuration names.
    assert "left_out" in report["sample"]


def test_the_loss_on_a_sample(tmp_path, capsys):
    """A checkpoint whose tokenizer is at hand: the loss is that of the text's tokens, by the definition."""
    model = write_checkpoint(tmp_path / "ours", "alibi", "nowhere")
    (tmp_path / "sample.txt").write_text(PYTHON[:300])
    archive = tmp_path / "ours.tar.gz"
    with tarfile.open(archive, "w:gz") as opened:
        opened.add(tmp_path / "ours", "deep/er")
    arguments = [str(archive), "-o", str(tmp_path / "out"), "--sample", str(tmp_path / "sample.txt")]
    import_release.main([*arguments, "--json"])
    report = json.loads(capsys.readouterr().out)
    ids = torch.tensor(list(PYTHON[:300].encode()))
    with torch.no_grad():
        losses = [
            -model(ids[None, start : start + 32])[0].log_softmax(-1)[i, ids[start + i + 1]]
            for start in range(0, 299, 32)
            for i in range(min(32, 299 - start))
        ]
    assert report["sample"]["tokens"] == len(losses) == 299
    assert report["sample"]["loss"] == pytest.approx(float(sum(losses)) / 299, rel=1e-5)

    shutil.rmtree(tmp_path / "out")
    import_release.main(arguments)
    readable = capsys.readouterr().out
    assert f"loss on {tmp_path / 'sample.txt'}: {report['sample']['loss']:.3f} nats" in readable
    assert f"load={tmp_path / 'out' / 'deep' / 'er'}" in readable


@pytest.mark.parametrize("harm", ["not finite", "other size", "exploit"])
def test_a_bad_archive_leaves_nothing(harm, tmp_path, monkeypatch):
    shutil.copytree(checkpoints("alibi"), tmp_path / "source")
    step = tmp_path / "source" / "global_step300"
    path = step / "layer_03-model_00-model_states.pt"
    state = torch.load(path, weights_only=True)
    expected = path.name
    if harm == "not finite":
        state["mlp.dense_h_to_4h.weight"][3, 4] = float("nan")
        torch.save(state, path)
    elif harm == "other size":
        state["mlp.dense_h_to_4h.weight"] = torch.zeros(64, 32)
        torch.save(state, path)
    else:

        class Exploit:
            def __reduce__(self):
                return (tmp_path / "owned").write_text, ("owned",)

        expected = "mp_rank_00_model_states.pt"
        torch.save({"iteration": 300, "args": Exploit()}, step / expected)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=expected):
        import_release.main([str(zipped(tmp_path / "source", tmp_path / "bad.zip"))])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.zip", "source"]
