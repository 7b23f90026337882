"""load_model: the release's layout and ours as plain PyTorch, and what it refuses."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

from megatron.checkpoint.storage import CheckpointError
from megatron.config import UserError
from megatron.inference import load_model
from tests.support.release import checkpoints, reference
from tests.support.runs import ROOT, environment

SPLIT_DIM = {
    "word_embeddings.weight": 0,
    "final_linear.weight": 0,
    "attention.query_key_value.weight": 0,
    "attention.query_key_value.bias": 0,
    "mlp.dense_h_to_4h.weight": 0,
    "mlp.dense_h_to_4h.bias": 0,
    "attention.dense.weight": 1,
    "mlp.dense_4h_to_h.weight": 1,
    "attention.rpe.bias_p": 0,
    "attention.rpe.bias_a": 0,
    "attention.rpe.weight": 1,
}


@pytest.fixture
def copy(tmp_path):
    """A copy of a released checkpoint that a test may spoil; gives (folder, its step's folder)."""

    def make(method: str = "kerple_log"):
        folder = tmp_path / method
        shutil.copytree(checkpoints(method), folder)
        return folder, folder / "global_step300"

    return make


@pytest.mark.parametrize("method", ["kerple_log", "rpe", "rotary"])
def test_tensor_parallel_release_equals_the_whole(method, copy):
    """As the release writes it on two ranks: one file per rank, the kernels' parameters split by heads."""
    folder, step = copy(method)
    for path in sorted(step.glob("layer_*-model_00-*.pt")):
        state = torch.load(path, weights_only=True)
        for rank in range(2):
            part = {
                name: tensor.chunk(2, SPLIT_DIM[name])[rank].clone() if name in SPLIT_DIM else tensor
                for name, tensor in state.items()
            }
            torch.save(part, path.with_name(path.name.replace("model_00", f"model_{rank:02d}")))
    model, _ = load_model(folder)
    expected = reference(method)[32]
    with torch.no_grad():
        torch.testing.assert_close(model(expected["tokens"].long()), expected["logits"], atol=1e-4, rtol=0)


def test_model_is_plain_trainable_torch():
    model, config = load_model(checkpoints("kerple_log"), dtype=torch.float64)
    assert config.model.hidden_size == 32
    assert not model.training
    logits = model(torch.tensor([[1, 2, 3]]))
    assert logits.shape == (1, 3, 128)
    assert logits.dtype == torch.float64
    logits.sum().backward()
    assert model.blocks[0].attention.rpe.bias_p.grad.abs().sum() > 0


def test_neither_deepspeed_nor_a_process_group_is_needed():
    code = (
        "import sys, torch; from megatron.inference import load_model;"
        f"load_model({str(checkpoints('rotary'))!r});"
        "assert 'deepspeed' not in sys.modules and 'megatron.core' not in sys.modules;"
        "assert not torch.distributed.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_positional_methods_stand_alone():
    """The README's claim: torch and nothing else of this project or of the training libraries."""
    code = (
        "import sys; from kerple.positional import KerpleLog; from kerple.attention import attend;"
        "loaded = [name for name in sys.modules if name.startswith(('deepspeed', 'megatron', 'pydantic'))];"
        "extra = [n for n in loaded if not n.startswith(('kerple.positional', 'kerple.attention'))"
        " and n not in ('megatron', 'megatron.model')];"
        "assert not extra, extra"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_overrides_are_taken():
    _, config = load_model(checkpoints("kerple_log"), overrides={"attention-backend": "reference"})
    assert config.model.attention_backend == "reference"


def test_code_named_by_a_checkpoint_is_not_run(copy, tmp_path):
    folder, step = copy()
    trap = tmp_path / "trap.py"
    trap.write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')")
    (step / "configs" / "train.yml").write_text(
        json.dumps({**json.loads((step / "configs" / "train.yml").read_text()), "pos_emb_module": str(trap)})
    )
    load_model(folder)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden-size", 64, r"\(128, 32\).*\(128, 64\)"),
        ("num-layers", 3, "num-layers"),
        ("pos-emb", "alibi", r"attention\.rpe\.bias_"),
        ("pos-emb", "rpe", r"lacks attention\.rpe\.weight"),
    ],
)
def test_another_configuration_is_named(key, value, message, copy):
    folder, step = copy()
    config = step / "configs" / "train.yml"
    config.write_text(json.dumps({**json.loads(config.read_text()), key: value}))
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


def test_missing_pieces_are_named(copy, tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        load_model(tmp_path / "nothing")
    folder, step = copy()
    with pytest.raises(UserError, match=r"iteration 7.*0, 300"):
        load_model(folder, iteration=7)
    (folder / "latest").write_text("global_step9")
    with pytest.raises(UserError, match="global_step9"):
        load_model(folder)
    (folder / "latest").unlink()
    with pytest.raises(UserError, match="latest"):
        load_model(folder)
    (step / "layer_03-model_00-model_states.pt").unlink()
    with pytest.raises(UserError, match=r"layer 3|layer_03"):
        load_model(folder, iteration=300)
    shutil.rmtree(step / "configs")
    with pytest.raises(UserError, match="configs"):
        load_model(folder, iteration=300)
