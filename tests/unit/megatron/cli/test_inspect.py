"""The command line of `kerple inspect`; tests/integration/test_checkpoint_tools.py shows
checkpoints.
"""

import json
import os

import pytest

from megatron.checkpoint.storage import CheckpointError
from megatron.cli.inspect import main
from megatron.data.indexed_dataset import bin_path, file_sha256, open_indexed_files
from megatron.preparation.documents import DocumentOptions
from megatron.preparation.input_files import find_files
from megatron.preparation.preprocessing import preprocess
from megatron.preparation.readers import FileCorpus
from tests.support.corpora import BYTE_TOKENIZER
from tests.support.errors import assert_rejected


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


def test_a_dataset_is_compared_with_its_manifest(tmp_path, capsys):
    """The whole .bin, also the part that no sample covers."""
    (tmp_path / "long.txt").write_text("seven words are repeated in this text " * 80_000)
    source = FileCorpus(find_files([tmp_path / "long.txt"]))
    preprocess(
        source,
        tmp_path / "a",
        BYTE_TOKENIZER,
        DocumentOptions(append_eod=True),
        inputs=["long.txt"],
    )
    prefix = tmp_path / "a_text_document"
    assert main([str(prefix), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["manifest"], shown["documents"], shown["largest_id"]) == ("whole", 1, ord("x"))
    assert shown["sha256"] == file_sha256(bin_path(prefix))

    # A bit between two samples.
    with open(bin_path(prefix), "r+b") as stream:
        stream.seek(131_072 + 50)
        (byte,) = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 4]))
    open_indexed_files(prefix)
    assert_rejected(r"a_text_document\.bin", main, [str(prefix)])
    os.remove(f"{prefix}.json")
    assert main([str(prefix)]) == 0
    os.truncate(f"{prefix}.bin", 1000)
    assert_rejected(r"a_text_document\.bin", main, [str(prefix)])
