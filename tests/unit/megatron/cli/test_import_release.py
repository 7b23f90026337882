"""The command line of `kerple import-release`; tests/integration/test_checkpoint_tools.py imports
archives.
"""

import pytest

from megatron.checkpoint.storage import CheckpointError
from megatron.cli.import_release import main
from tests.support.archives import zip_of


def test_an_archive_without_a_checkpoint(tmp_path):
    archive = tmp_path / "empty.zip"
    archive.write_bytes(zip_of({"folder/notes.txt": b""}))
    with pytest.raises(CheckpointError, match=r"`latest`.*none"):
        main([str(archive), "-o", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
