"""load_model: released checkpoints and this project's as plain PyTorch models, and
what it rejects.
"""

import json
import shutil

import pytest
import torch

from kerple.positional import PositionalMethod
from megatron.checkpoint.manifest import write_manifest_of_folder
from megatron.checkpoint.storage import CheckpointError
from megatron.inference import load_model
from megatron.model.gpt import GPT
from tests.support.checkpoints import Exploit
from tests.support.errors import assert_rejected
from tests.support.release import checkpoints, reference, split_for_ranks


@pytest.fixture
def copy(tmp_path):
    """A copy of a released checkpoint that a test may modify: (folder, folder of its step)."""

    def make(method: str = "kerple_log"):
        folder = tmp_path / method
        shutil.copytree(checkpoints(method), folder)
        return folder, folder / "global_step300"

    return make


@pytest.mark.parametrize("method", ["kerple_log", "rpe", "rotary"])
def test_a_tensor_parallel_release_gives_the_same_logits(method, copy):
    """Two ranks: one file per rank, the positional parameters split by heads."""
    folder, step = copy(method)
    split_for_ranks(step, 2)
    model, _ = load_model(folder)
    expected = reference(method)[32]
    with torch.no_grad():
        torch.testing.assert_close(
            model(expected["tokens"].long()), expected["logits"], atol=1e-4, rtol=0
        )


def test_model_is_plain_trainable_torch():
    model, config = load_model(checkpoints("kerple_log"), dtype=torch.float64)
    assert config.model.hidden_size == 32
    assert not model.training
    logits = model(torch.tensor([[1, 2, 3]]))
    assert logits.shape == (1, 3, 128)
    assert logits.dtype == torch.float64
    logits.sum().backward()
    assert model.blocks[0].attention.rpe.bias_p.grad.abs().sum() > 0


@pytest.mark.parametrize(("method", "tensor_parallel"), [("kerple_log", 2), ("learned", 1)])
def test_one_model_is_built_and_each_file_is_read_once(method, tensor_parallel, copy, monkeypatch):
    """The layers share one positional method. The options and the sizes are checked with others on
    the meta device.
    """
    folder, step = copy(method)
    split_for_ranks(step, tensor_parallel)
    write_manifest_of_folder(step, 300)
    opened, models, methods = [], [], []
    load, build_model, build_method = torch.load, GPT.__init__, PositionalMethod.__init__

    def count_model(self, *args):
        if torch.empty(0).device.type != "meta":
            models.append(self)
        build_model(self, *args)

    def count_method(self, *args):
        if torch.empty(0).device.type != "meta":
            methods.append(self)
        build_method(self, *args)

    monkeypatch.setattr(
        torch, "load", lambda path, **keys: opened.append(path.name) or load(path, **keys)
    )
    monkeypatch.setattr(GPT, "__init__", count_model)
    monkeypatch.setattr(PositionalMethod, "__init__", count_method)
    model, _ = load_model(folder)
    files = sorted(path.name for path in step.glob("layer_*.pt"))
    assert len(files) == 5 * tensor_parallel
    # The state file names the tokenizer. With several ranks, it also says which program wrote them:
    # before the model is built, and after.
    assert sorted(opened) == files + ["mp_rank_00_model_states.pt"] * (
        3 if tensor_parallel > 1 else 1
    )
    assert models == [model]
    assert len(methods) == 1


def test_a_malicious_layer_file(copy, tmp_path):
    folder, step = copy()
    file = step / "layer_03-model_00-model_states.pt"
    torch.save(
        {**torch.load(file, weights_only=True), "extra": Exploit(tmp_path / "written")}, file
    )
    with pytest.raises(CheckpointError, match=f"{file.name}: rejected"):
        load_model(folder)
    assert not (tmp_path / "written").exists()


def test_code_named_by_a_checkpoint_does_not_run(copy, tmp_path):
    folder, step = copy()
    trap = tmp_path / "trap.py"
    trap.write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')")
    (step / "configs" / "train.yml").write_text(
        json.dumps(
            {
                **json.loads((step / "configs" / "train.yml").read_text()),
                "pos_emb_module": str(trap),
            }
        )
    )
    load_model(folder)
    assert not (tmp_path / "sprung").exists()


def test_checkpoints_that_cannot_be_loaded(copy, tmp_path):
    """With another model in the configuration, or a missing part."""
    assert_rejected("no such folder", load_model, tmp_path / "nothing")
    folder, step = copy()
    config = step / "configs" / "train.yml"
    saved = json.loads(config.read_text())
    config.write_text(json.dumps({**saved, "hidden-size": 64}))
    assert_rejected(r"128, 32.*64", load_model, folder)
    config.write_text(json.dumps(saved))
    assert_rejected(r"7.*0, 300", load_model, folder, iteration=7)
    (folder / "latest").write_text("global_step9")
    assert_rejected("global_step9", load_model, folder)
    (folder / "latest").unlink()
    assert_rejected("latest", load_model, folder)
    (step / "layer_03-model_00-model_states.pt").unlink()
    assert_rejected(r"layer 3|layer_03", load_model, folder, iteration=300)
    shutil.rmtree(step / "configs")
    assert_rejected("configs", load_model, folder, iteration=300)
