"""The command line of `kerple inspect`; tests/integration/test_checkpoint_tools.py shows checkpoints."""

import pytest

from megatron.checkpoint.storage import CheckpointError
from megatron.cli.inspect import main


def test_accept_and_iteration_are_rejected(tmp_path):
    step = tmp_path / "global_step3"
    step.mkdir()
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        main([str(step), "--accept"])
    assert not any(step.iterdir())
    (step / "manifest.json").write_text("{}")
    for words in (["--accept"], ["--iteration", "3"]):
        with pytest.raises(CheckpointError, match=words[0]):
            main([str(step), *words])
