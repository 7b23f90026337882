"""Looking into datasets: figures, the histogram, decoded documents, and damage."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from megatron.data.documents import DocumentOptions
from megatron.data.indexed_format import check_indexed_files
from megatron.data.input_files import find_files
from megatron.data.inspection import decode_document, draw_lengths, inspect
from megatron.data.manifest import manifest_path
from megatron.data.preprocessing import preprocess
from megatron.data.readers import Corpus
from megatron.data.workers import TokenizerFiles
from megatron.tokenizer import build_tokenizer
from megatron.utils.errors import UserError

CHARACTERS = build_tokenizer("CharLevelTokenizer")


@pytest.fixture
def dataset(tmp_path, documents) -> str:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    corpus = Corpus(find_files([tmp_path / "a.jsonl"]))
    preprocess(corpus, tmp_path / "d", TokenizerFiles("CharLevelTokenizer"), DocumentOptions(append_eod=True))
    return str(tmp_path / "d_text_document")


def test_figures(dataset, documents):
    found, files = inspect(dataset, CHARACTERS)
    sizes = sorted(len(text.encode()) + 1 for text in documents if text)
    assert (found.documents, found.tokens) == (len(sizes), sum(sizes))
    assert found.length_quantiles[0] == sizes[0]
    assert found.length_quantiles[100] == sizes[-1]
    assert found.length_quantiles[50] in sizes
    assert found.mean_length == pytest.approx(np.mean(sizes))
    assert found.bytes_per_token == (sum(sizes) - len(sizes)) / sum(sizes)
    assert (found.smallest_id, found.largest_id, found.dtype) == (0, int(files.map_tokens().max()), "uint16")
    assert found.checksum == "matches"
    kept = [text for text in documents if text]
    assert decode_document(files, 5, CHARACTERS) == kept[5] + "\0"
    assert decode_document(files, len(kept) - 1, CHARACTERS, 4) == kept[-1][:4]
    with pytest.raises(UserError, match=rf"document {len(kept)} of .* does not exist"):
        decode_document(files, len(kept), CHARACTERS)


def test_without_a_manifest(dataset, documents):
    expected = inspect(dataset)[0].bytes_per_token
    manifest_path(dataset).unlink()
    found = inspect(dataset)[0]
    assert (found.checksum, found.bytes_per_token) == ("no manifest", None)
    assert inspect(dataset, CHARACTERS)[0].bytes_per_token == pytest.approx(
        expected, rel=1e-3
    )  # a NUL in the text is an eod too


def test_histogram(dataset, tmp_path):
    draw_lengths(inspect(dataset)[1], tmp_path / "lengths.png")
    picture = image.imread(tmp_path / "lengths.png")
    assert picture.shape[:2] == (540, 960)
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 5


@pytest.mark.parametrize(
    ("name", "message"), [("a.foo", "cannot draw .*a.foo: Format 'foo'"), ("no/a.png", "No such file")]
)
def test_a_picture_that_cannot_be_written(dataset, tmp_path, name, message):
    with pytest.raises(UserError, match=message):
        draw_lengths(check_indexed_files(dataset), tmp_path / name)


def test_damage_is_found(dataset, tokenizer):
    with pytest.raises(UserError, match="was made with another CharLevelTokenizer than the one given"):
        inspect(dataset, tokenizer)
    path = Path(f"{dataset}.bin")
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"is not the file that .*d_text_document.json tells of .*damaged or replaced"):
        inspect(dataset)
    manifest_path(dataset).unlink()
    content[101] = 0xFF
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"holds token id 65\d+, outside of the vocabulary of 512"):
        inspect(dataset, CHARACTERS)
