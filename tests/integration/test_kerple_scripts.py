"""Scripts and configurations like those of the KERPLE release, at small sizes: generate_ymls.py,
train.sh, test.sh.
"""

import json
import re
from pathlib import Path

import pytest

from megatron.config import load_config
from megatron.launcher.main import parse_command_line
from megatron.preparation.prepare import PrepareOptions, prepare
from tests.support.commands import commands_of, make_checkout, run_here
from tests.support.corpora import json_lines
from tests.support.runs import unwrapped
from tests.support.texts import PYTHON

METHODS = ("kerple_power_ap_", "kerple_log")
DATASETS = ("arxiv", "github")
LENGTHS = (16, 32, 64)

# The release writes True and False as in Python, and some keys with dashes, others with
# underscores.
LOCAL_SETUP = """{
  "vocab-file": "data/gpt2-vocab.json",
  "merge-file": "data/gpt2-merges.txt",
  "checkpoint_validation_with_forward_pass": False,
  "tensorboard-dir": "tensorboard",
  "use_wandb": False,
  "wandb_project": "neox"
}
"""
RECIPE = """{
  "pipe-parallel-size": 1, "model-parallel-size": 1,
  "num-layers": 1, "hidden-size": 32, "num-attention-heads": 4,
  "seq-length": 16, "seq-length-val": 64, "max-position-embeddings": 16,
  "norm": "layernorm", "no-weight-tying": true,
  "scaled-upper-triang-masked-softmax-fusion": false, "bias-gelu-fusion": false,
  "optimizer": {"type": "Adam", "params": {"lr": 0.0006, "betas": [0.9, 0.999], "eps": 1.0e-8,}},
  "zero_optimization": {"stage": 0, "overlap_comm": True, "reduce_scatter": True, "cpu_offload": False},
  "train_micro_batch_size_per_gpu": %(micro_batch)d, "data-impl": "mmap", "split": "949,50,1",
  "checkpoint-activations": true, "checkpoint-num-layers": 1,
  "partition-activations": true, "synchronize-each-layer": true,
  "gradient_clipping": 1.0, "weight-decay": 0.0, "hidden-dropout": 0.0, "attention-dropout": 0.0,
  "fp16": {"enabled": True, "type": "bfloat16", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2},
  "fp32_allreduce": True,
  "train-iters": %(train_iters)d, "lr-decay-iters": 4, "distributed-backend": "nccl", "lr-decay-style": "cosine",
  "warmup": 0.01, "save-interval": 4, "eval-interval": 4, "eval-iters": 2,
  "log-interval": 2, "steps_per_print": 10, "keep-last-n-checkpoints": 1, "wall_clock_breakdown": true,
}
"""  # noqa: E501
TRAIN = """for seed in {1235..1236}
do
  for rpe in kerple_power_ap_ kerple_log
  do
    for dataset in arxiv github
    do
      python ./deepy.py train.py kerple_configs/local_setup.yml kerple_configs/train.yml \
        kerple_configs/exp_configs/"$rpe"_"$dataset"_"$seed".yml
    done
  done
done
"""
TEST = """for seed in {1235..1236}
do
  for rpe in kerple_power_ap_ kerple_log
  do
    for dataset in arxiv github
    do
      for length in 16 32 64
      do
        python ./deepy.py train.py kerple_configs/local_setup.yml kerple_configs/ex_eval.yml \
          kerple_configs/exp_configs/"$rpe"_"$dataset"_"$seed".yml kerple_configs/lengths/length_"$length".yml
      done
    done
  done
done
"""  # noqa: E501


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkout with the release's scripts, its configurations, and one of its datasets."""
    folder = make_checkout(tmp_path_factory.mktemp("kerple"))
    configs = folder / "kerple_configs"
    for name in ("exp_configs", "lengths"):
        (configs / name).mkdir(parents=True)
    (configs / "local_setup.yml").write_text(LOCAL_SETUP)
    (configs / "train.yml").write_text(RECIPE % {"micro_batch": 4, "train_iters": 4})
    (configs / "ex_eval.yml").write_text(RECIPE % {"micro_batch": 1, "train_iters": 0})
    for length in LENGTHS:
        (configs / "lengths" / f"length_{length}.yml").write_text(
            json.dumps({"seq-length-val": length}, indent=4)
        )
    for method in METHODS:
        for dataset in DATASETS:
            for seed in (1235, 1236):
                run = f"{method}_{dataset}_{seed}"
                keys = {
                    "save": f"{run}_checkpoints",
                    "load": f"{run}_checkpoints",
                    "log-dir": f"{run}_logs",
                    "seed": seed,
                    "data-path": f"data/{dataset}/{dataset}_text_document",
                    "pos-emb": method,
                }
                (configs / "exp_configs" / f"{run}.yml").write_text(json.dumps(keys, indent=4))
    (folder / "train.sh").write_text(TRAIN)
    (folder / "test.sh").write_text(TEST)
    documents = [PYTHON[start : start + 800] for start in range(0, 32_000, 800)]
    (folder / "arxiv.jsonl").write_bytes(json_lines(*documents))
    files = (str(folder / "data" / name) for name in ("gpt2-vocab.json", "gpt2-merges.txt"))
    prepare(
        PrepareOptions(
            "arxiv", folder / "data", None, *files, sources=(str(folder / "arxiv.jsonl"),)
        )
    )
    return folder


def test_every_combination_loads(folder, monkeypatch):
    monkeypatch.chdir(folder)
    ignored = [
        "partition-activations",
        "synchronize-each-layer",
        "steps_per_print",
        "wall_clock_breakdown",
    ]
    for script, expected in (("train.sh", ignored), ("test.sh", ["seq-length-val", *ignored])):
        commands = commands_of(folder / script)
        assert len(commands) == (8 if script == "train.sh" else 24)
        for line in commands:
            arguments = parse_command_line(line.split()[1:])
            config = load_config(arguments.files)
            same_length = script == "test.sh" and config.training.seq_length_val == 64
            keys = [notice.split('"')[1] for notice in config.notices]
            assert keys == (expected[1:] if same_length else expected)
            if script == "test.sh":
                assert line.endswith(f"length_{config.training.seq_length_val}.yml")
            if script == "test.sh" and not same_length:
                place = (
                    r"length_[0-9]+.yml overrides .*\(line 2\).* at kerple_configs/ex_eval.yml:4$"
                )
                assert re.search(place, config.notices[0])


@pytest.mark.ci
def test_training_and_evaluation(folder, monkeypatch, capsys):
    """train.sh's command, then test.sh's at two lengths, for the first run."""
    monkeypatch.delenv("RANK", raising=False)
    train, *_ = commands_of(folder / "train.sh")
    short, _, long, *_ = commands_of(folder / "test.sh")
    run_here(train, folder, monkeypatch)
    assert "iteration 4/4" in capsys.readouterr().out
    losses = []
    for line, length in ((short, 16), (long, 64)):
        run_here(line, folder, monkeypatch)
        output = unwrapped(capsys.readouterr().out)
        assert "iteration 4, 16 samples read" in output
        losses += re.findall(
            rf"validation at iteration 4 \| length {length} \| lm loss (\d+\.\d+)", output
        )
    assert len(set(losses)) == 2
