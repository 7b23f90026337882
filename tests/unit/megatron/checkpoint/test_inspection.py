"""tools/ckpts/inspect.py, as it is started, and the description it prints."""

import inspect as standard
import json
import shutil
import subprocess
import sys

import pytest
import torch

from megatron.checkpoint.storage import CheckpointError
from megatron.config import Config
from megatron.inference import load_model
from megatron.training.loop import train
from tests.support.checkpoints import write_corpus
from tests.support.release import METHODS, checkpoints
from tests.support.runs import ROOT, environment, training_settings
from tools.ckpts.inspect import main

TOOLS = ROOT / "tools" / "ckpts"


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ours")
    data_path = write_corpus(folder, documents=40)
    train(Config.from_flat(training_settings(folder, data_path, eval_iters=0)))
    return folder / "checkpoints"


def inspect(capsys, *arguments):
    status = main([*map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("method", METHODS)
def test_release_is_described_as_the_model_that_loads(method, capsys):
    status, found = inspect(capsys, checkpoints(method))
    model, _ = load_model(checkpoints(method))
    assert status == 0
    assert (found["iteration"], found["manifest"], found["tensor_parallel"]) == (300, "none", 1)
    assert found["optimizer"] == "the release's"
    if method != "kerple_power_original":  # there the release counts what is a constant of ours
        assert found["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    (positional,) = model.positional_methods().values()
    expected = {name: values.tolist() for name, values in positional.statistics().items()}
    if positional.has_bias:
        expected["effective_length"] = positional.effective_length().tolist()
    assert found["kernels"] == ({"all layers": expected} if expected else {})


def test_own_checkpoint(ours, capsys):
    status, found = inspect(capsys, ours)
    assert status == 0
    assert found["manifest"] == "whole"
    assert found["training"]["consumed_samples"] == 48
    assert found["dtypes"] == ["float32"]
    assert found["optimizer"] == "per parameter, in 1 file"
    assert found["shape"]["zero_stage"] == 0
    assert inspect(capsys, ours, "--iteration", 3)[1]["iteration"] == 3
    assert inspect(capsys, ours / "global_step3")[1]["iteration"] == 3


def test_damage_is_told(ours, tmp_path, capsys):
    shutil.copytree(ours, tmp_path / "copy")
    file = tmp_path / "copy/global_step6/optimizer_rank_00000.pt"
    data = bytearray(file.read_bytes())
    data[-200] ^= 4
    file.write_bytes(data)
    status, found = inspect(capsys, tmp_path / "copy")
    assert status == 1
    assert "optimizer_rank_00000.pt: contents" in found["manifest"]


def test_comparison_names_the_tensors_that_differ(ours, tmp_path, capsys):
    shutil.copytree(ours, tmp_path / "copy")
    assert inspect(capsys, ours, tmp_path / "copy")[1]["differences"] == {"values": {}, "tensors": {}}
    file = tmp_path / "copy/global_step6/layer_03-model_00-model_states.pt"
    state = torch.load(file, weights_only=True)
    state["mlp.dense_4h_to_h.bias"][5] += 0.25
    torch.save(state, file)
    found = inspect(capsys, ours, tmp_path / "copy")[1]["differences"]
    assert set(found["tensors"]) == {"layer_03-model_00-model_states.pt/mlp.dense_4h_to_h.bias"}
    assert next(iter(found["tensors"].values())) == pytest.approx(0.25)
    assert file.name in found["values"]["manifest"][1]
    other = inspect(capsys, ours, checkpoints("kerple_log"))[1]["differences"]
    assert other["tensors"]["layer_00-model_00-model_states.pt/word_embeddings.weight"] == (
        "shapes (512, 32) and (128, 32)"
    )


def test_a_lost_manifest_is_told_and_written_anew_when_asked(ours, tmp_path, capsys):
    shutil.copytree(ours, tmp_path / "copy")
    step = tmp_path / "copy/global_step6"
    (step / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json: no such file.*--accept.*iteration 3; use it"):
        load_model(tmp_path / "copy")
    status, found = inspect(capsys, tmp_path / "copy")
    assert status == 1
    assert "manifest.json: no such file" in found["manifest"]
    # Of a run that saves neither optimizer nor random states, too.
    for file in [*step.glob("optimizer_*"), *step.glob("random_*")]:
        file.unlink()
    assert inspect(capsys, tmp_path / "copy")[0] == 1
    assert inspect(capsys, tmp_path / "copy", "--accept")[1]["manifest"] == "whole"
    load_model(tmp_path / "copy")
    (step / "optimizer_rank_00000.pt").write_bytes(b"of another run")
    with pytest.raises(CheckpointError, match=r"optimizer_rank_00000\.pt: is not in the manifest"):
        load_model(tmp_path / "copy")
    with pytest.raises(CheckpointError, match=r"this one has it, which reports: .*is not in the manifest"):
        inspect(capsys, tmp_path / "copy", "--accept")


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        main([str(tmp_path / "nowhere")])


def test_script_prints_a_table(ours):
    done = subprocess.run(
        [sys.executable, str(TOOLS / "inspect.py"), str(ours)], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for part in ("manifest        whole", "1 tensor parallel", "bias_p", "effective_length", "samples read    48"):
        assert part in done.stdout


@pytest.mark.parametrize("tool", sorted(path.name for path in TOOLS.glob("*.py")))
def test_no_tool_takes_its_neighbour_for_the_standard_librarys(tool):
    """Python looks for modules in the folder of the script that it runs, and one here is called inspect."""
    done = subprocess.run(
        [sys.executable, "-i", str(TOOLS / tool), "--help"],
        input="import inspect, sys; print('found', inspect.__file__, sys.path[0])",
        env=environment(),
        capture_output=True,
        text=True,
    )
    (found,) = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    assert found.split() == ["found", standard.__file__, str(ROOT)]
