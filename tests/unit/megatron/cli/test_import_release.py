"""The command line of `kerple import-release`; tests/integration/test_checkpoint_tools.py imports
archives.
"""

import pytest

from megatron.checkpoint.storage import CheckpointError
from megatron.cli.import_release import main
from tests.support.archives import zip_of
from tests.support.release import checkpoints


def test_an_archive_without_a_checkpoint(tmp_path):
    archive = tmp_path / "empty.zip"
    archive.write_bytes(zip_of({"folder/notes.txt": b""}))
    with pytest.raises(CheckpointError, match=r"`latest`.*none"):
        main([str(archive), "-o", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"pos-emb": "none"}',
            "a.zip: ck/global_step300: .*\"pos-emb\" is 'alibi' in train.yml:1",
        ),
        ('{"num-attention-heads": 8}', '"num-attention-heads" is 4 in train.yml:1, 8 in zz.yml:1'),
    ],
)
def test_an_archive_with_configurations_of_two_models(text, message, tmp_path):
    files = {"ck/global_step300/configs/zz.yml": text.encode()}
    for path in checkpoints("alibi").rglob("*"):
        if path.is_file():
            files[f"ck/{path.relative_to(checkpoints('alibi'))}"] = path.read_bytes()
    archive = tmp_path / "a.zip"
    archive.write_bytes(zip_of(files))
    with pytest.raises(CheckpointError, match=message):
        main([str(archive), "-o", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
