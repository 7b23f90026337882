"""The command line of `kerple inspect`; tests/integration/test_checkpoint_tools.py shows checkpoints."""

import pytest

from megatron.checkpoint.storage import CheckpointError
from megatron.cli.inspect import main


def test_accept_rejects_a_checkpoint_with_a_manifest(tmp_path):
    step = tmp_path / "global_step3"
    step.mkdir()
    (step / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="--accept"):
        main([str(step), "--accept"])
