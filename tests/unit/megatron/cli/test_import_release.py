"""The command line of `kerple import-release`; tests/integration/test_checkpoint_tools.py imports
archives.
"""

import shutil

import pytest
import torch

from megatron.checkpoint.manifest import write_manifest_of_folder
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


def test_a_checkpoint_of_this_project(tmp_path):
    """Its optimizer files have no checksums of their own, but its manifest has."""
    folder = shutil.copytree(checkpoints("alibi"), tmp_path / "ck")
    step = folder / "global_step300"
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    torch.save({"step": torch.ones(3)}, step / "optimizer_rank_00000.pt")
    torch.serialization.set_crc32_options(before)
    write_manifest_of_folder(step, 300)
    files = {}
    for path in folder.rglob("*"):
        if path.is_file():
            files[str(path.relative_to(tmp_path))] = path.read_bytes()
    archive = tmp_path / "a.zip"
    archive.write_bytes(zip_of(files))
    main([str(archive), "-o", str(tmp_path / "out")])
    assert (tmp_path / "out").exists()

    # The manifest names a file that has changed.
    name = "ck/global_step300/optimizer_rank_00000.pt"
    files[name] = files[name][:-1] + bytes([files[name][-1] ^ 1])
    archive.write_bytes(zip_of(files))
    with pytest.raises(CheckpointError, match="optimizer_rank_00000"):
        main([str(archive), "-o", str(tmp_path / "other")])


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
