"""No file of a checkpoint runs code, and none holds a secret."""

import json
import pickle
import shutil

import pytest
import torch

from megatron.checkpoint.directory import write_manifest_of_folder
from megatron.checkpoint.storage import CheckpointError, load_file, load_tensors
from megatron.config import Config
from megatron.inference import load_model
from megatron.training.loop import train
from tests.support.checkpoints import write_corpus
from tests.support.release import checkpoints
from tests.support.released_runs import released_settings, write_release_corpus, write_tokenizer
from tests.support.runs import training_settings

KINDS = [
    "layer_02-model_00-model_states.pt",
    "mp_rank_00_model_states.pt",
    "optimizer_rank_00000.pt",
    "random_rank_00000.pt",
    "forward_pass.pt",
]


class Exploit:
    """Unpickling it writes a file."""

    def __init__(self, target):
        self.target = str(target)

    def __reduce__(self):
        return exec, (f"open({self.target!r}, 'w').write('executed')",)


@pytest.fixture(scope="module")
def data_path(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents=40)


@pytest.fixture(scope="module")
def run(tmp_path_factory, data_path):
    """A trained folder whose checkpoint has files of all kinds."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_API_KEY", "wandb-secret-value")
        train(Config.from_flat(settings(folder, data_path)))
    return folder


def settings(folder, data_path, **keys):
    extra = {"comet": {"enabled": False, "api_key": "other-secret-value"}}
    return training_settings(
        folder,
        data_path,
        train_iters=2,
        eval_iters=0,
        checkpoint_validation_with_forward_pass=True,
        deepspeed_extra_args=extra,
        **keys,
    )


def test_the_exploit_is_a_real_one(tmp_path):
    torch.save({"w": Exploit(tmp_path / "written")}, tmp_path / "file.pt")
    torch.load(tmp_path / "file.pt", weights_only=False)
    assert (tmp_path / "written").read_text() == "executed"


@pytest.mark.parametrize("form", ["zip", "pickle"])
@pytest.mark.parametrize("read", [load_file, load_tensors, lambda path: load_tensors(path, mmap=True)])
def test_exploit_is_refused(form, read, tmp_path):
    path, target = tmp_path / "file.pt", tmp_path / "written"
    if form == "zip":
        torch.save({"w": torch.ones(3), "x": Exploit(target)}, path)
    else:
        path.write_bytes(pickle.dumps({"x": Exploit(target)}))
    with pytest.raises(CheckpointError, match=r"file\.pt"):
        read(path)
    assert not target.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_training_refuses_a_malicious_file_by_name(kind, run, tmp_path, data_path):
    """With a manifest that the attacker has brought up to date."""
    shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
    step = tmp_path / "checkpoints" / "global_step2"
    content = load_file(step / kind)
    torch.save({**content, "extra": Exploit(tmp_path / "written")}, step / kind)
    write_manifest_of_folder(step, 2)
    with pytest.raises(CheckpointError, match=rf"{kind}: refused.*exec"):
        train(Config.from_flat(settings(tmp_path, data_path) | {"train_iters": 3}))
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize("kind", ["layer_03-model_00-model_states.pt", "mp_rank_00_model_states.pt"])
def test_released_checkpoint_with_a_malicious_file(kind, tmp_path):
    shutil.copytree(checkpoints("kerple_log"), tmp_path / "release")
    file = tmp_path / "release" / "global_step300" / kind
    torch.save({**load_file(file), "extra": Exploit(tmp_path / "written")}, file)
    if kind.startswith("layer"):
        with pytest.raises(CheckpointError, match=f"{kind}: refused"):
            load_model(tmp_path / "release")
    write_tokenizer(tmp_path)
    write_release_corpus(tmp_path)
    with pytest.raises(CheckpointError, match=f"{kind}: refused"):
        train(Config.from_flat(released_settings(tmp_path, tmp_path, load=str(tmp_path / "release"))))
    assert not (tmp_path / "written").exists()


def without(name):
    return lambda state: {key: value for key, value in state.items() if key != name}


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("layer_02-model_00-model_states.pt", lambda _: [1], "contains a list instead of named tensors"),
        ("layer_00-model_00-model_states.pt", lambda _: {"word_embeddings.weight": 3}, "weight is a int, not a tensor"),
        (
            "random_rank_00000.pt",
            lambda state: {**state, "torch": torch.zeros(3, dtype=torch.uint8)},
            "does not contain random states",
        ),
        ("mp_rank_00_model_states.pt", without("shape"), "shape is missing"),
        ("mp_rank_00_model_states.pt", without("training"), "the entry training is missing"),
        ("optimizer_rank_00000.pt", without("parameters"), "is not an optimizer file"),
        (
            "optimizer_rank_00000.pt",
            lambda state: {
                **state,
                "parameters": {name: {**entry, "shape": (3,)} for name, entry in state["parameters"].items()},
            },
            "is not an optimizer file .*the fragment does not fit its shape",
        ),
    ],
)
def test_data_of_another_form_is_named(kind, change, message, run, tmp_path, data_path):
    """Nothing of it can run, and it is no reason for a traceback either."""
    shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
    step = tmp_path / "checkpoints" / "global_step2"
    torch.save(change(load_file(step / kind)), step / kind)
    write_manifest_of_folder(step, 2)
    with pytest.raises(CheckpointError, match=rf"{kind}: .*{message}"):
        train(Config.from_flat(settings(tmp_path, data_path) | {"train_iters": 3}))


def test_own_checkpoints_hold_no_secrets(run):
    step = run / "checkpoints" / "global_step2"
    for path in step.rglob("*"):
        if path.is_file():
            assert b"secret-value" not in path.read_bytes(), path
    saved = json.loads((step / "configs" / "config.yml").read_text())
    assert saved["deepspeed_extra_args"]["comet"] == {"enabled": False}
    assert saved["tokenizer_type"] == "CharLevelTokenizer"
