"""The options of `kerple sweep`."""

import pytest

from kerple.positional import registry
from megatron.cli import sweep as command
from megatron.config import UserError
from tests.support.errors import assert_rejected


def test_dry_run_changes_nothing(sweep):
    output = sweep("--dry-run")
    assert "2 runs in" in output
    assert not (sweep.folder / "out").exists()
    (sweep.folder / "text_document.idx").unlink()
    assert (
        sweep("--dry-run", write=False).count("text_document.idx (create it with prepare_data.py)")
        == 1
    )


METHOD = """
import torch
from kerple.positional import Bias, register


@register("test_root_of_mixture")
class RootOfMixture(Bias):
    def __init__(self, num_heads, power=0.5):
        super().__init__()
        self.power, self.mix = power, torch.nn.Parameter(torch.full((num_heads, 2), 0.1))

    def bias(self, distance):
        mixture = torch.stack((distance, distance.square()), dim=-1) @ self.mix.T
        return -mixture.movedim(-1, 0) ** self.power
"""


def test_dry_run_tries_a_step_of_each_model(sweep, tmp_path, monkeypatch):
    """In the dtype of the run. The derivative of a root is infinite at distance 0."""
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    path = tmp_path / "mixture.py"
    path.write_text(METHOD)
    keys = {"pos_emb": "test_root_of_mixture", "pos_emb_module": str(path)}
    axes = {"method": ["alibi.yml", {"name": "mine", **keys, "pos_emb_options": {"power": 1.0}}]}
    sweep("--dry-run", axes=axes)
    with pytest.raises(RuntimeError, match="dtype"):
        sweep("--dry-run", axes=axes, set={"precision": "bfloat16"})
    axes = {"method": [{"name": "mine", **keys}]}
    with pytest.raises(
        UserError, match=r"gradient of mix of pos_emb test_root_of_mixture .*distance 0"
    ):
        sweep("--dry-run", axes=axes)

    # A bias that depends on the distances it is asked for together.
    own = tmp_path / "normalized.py"
    text = METHOD.replace("test_root_of_mixture", "test_normalized")
    own.write_text(text.replace("** self.power", "/ distance.max()"))
    keys = {"pos_emb": "test_normalized", "pos_emb_module": str(own)}
    axes = {"method": [{"name": "mine", **keys}]}
    assert_rejected(r"test_normalized: \w+\.bias", sweep, "--dry-run", axes=axes)


def test_errors_before_anything_is_started(sweep, monkeypatch):
    with pytest.raises(SystemExit):
        sweep("--jobs", "0")
    assert_rejected(r"nowhere\.idx", sweep, set={"data-path": "nowhere"})
    monkeypatch.setattr(command, "visible_gpus", lambda: [0, 1])
    with pytest.raises(UserError, match=r"kerple_log/7.*4 GPUs.*2"):
        sweep(set={"num-gpus": 4, "train-batch-size": 8, "train_micro_batch_size_per_gpu": 2})
    assert_rejected("--jobs", sweep, "--jobs", "2")
    assert not sweep.runs.exists()


def test_the_folder_of_a_sweep_must_be_writable(sweep):
    (sweep.folder / "file").write_text("")
    assert_rejected(r"sweep\.yml.*file/out", sweep, output=str(sweep.folder / "file" / "out"))
