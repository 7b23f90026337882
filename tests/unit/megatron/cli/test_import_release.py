"""The command line of `kerple import-release`; tests/integration/test_checkpoint_tools.py imports archives."""

import zipfile

import pytest

from megatron.checkpoint.storage import CheckpointError
from megatron.cli.import_release import main


def test_an_archive_without_a_checkpoint(tmp_path):
    archive = tmp_path / "empty.zip"
    with zipfile.ZipFile(archive, "w") as stream:
        stream.writestr("folder/notes.txt", "")
    with pytest.raises(CheckpointError, match=r"`latest`.*none"):
        main([str(archive), "-o", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
