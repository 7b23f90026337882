"""Datasets out of datasets: merged, and split by document."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.data import rewriting, validation_stream
from megatron.data.documents import DocumentOptions
from megatron.data.indexed_format import check_indexed_files
from megatron.data.indexed_writer import IndexedWriter
from megatron.data.input_files import find_files
from megatron.data.manifest import Manifest, manifest_path, read_manifest, write_manifest
from megatron.data.preprocessing import preprocess
from megatron.data.readers import Corpus
from megatron.data.rewriting import merge, split
from megatron.data.selection import split_spans
from megatron.data.workers import TokenizerFiles
from megatron.utils.errors import UserError


def prepared(folder, name, text, **options) -> str:
    """A dataset made from `text`, one document per line."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(f'{{"text": "{line}"}}\n' for line in text.split()))
    options = DocumentOptions(append_eod=True, **options)
    preprocess(Corpus(find_files([path])), folder / name, TokenizerFiles("CharLevelTokenizer"), options, inputs=[name])
    return str(folder / f"{name}_text_document")


def contents(prefix) -> list[list[int]]:
    dataset = IndexedDataset(str(prefix))
    return [dataset[number].tolist() for number in range(len(dataset))]


def test_merge(tmp_path):
    prefixes = [
        prepared(tmp_path, "a", "one two"),
        prepared(tmp_path, "b", "three"),
        prepared(tmp_path, "c", "four five"),
    ]
    written = merge(prefixes, str(tmp_path / "all"))
    assert contents(tmp_path / "all") == [document for prefix in prefixes for document in contents(prefix)]
    manifest, parts = read_manifest(tmp_path / "all"), [read_manifest(prefix) for prefix in prefixes]
    assert (manifest.documents, manifest.tokens, manifest.sha256) == (written.documents, written.tokens, written.sha256)
    assert manifest.text_bytes == sum(part.text_bytes for part in parts) == len("onetwothreefourfive")
    assert manifest.inputs == ["a", "b", "c"]


def test_merge_is_the_file_of_all_inputs(tmp_path):
    together = prepared(tmp_path, "together", "one two three four")
    merge([prepared(tmp_path, "a", "one two three"), prepared(tmp_path, "b", "four")], str(tmp_path / "merged"))
    for ending in ("bin", "idx"):
        assert (tmp_path / f"merged.{ending}").read_bytes() == Path(f"{together}.{ending}").read_bytes()


def test_split_is_that_of_training(tmp_path):
    prefix = prepared(tmp_path, "a", " ".join(f"document{number}" for number in range(40)))
    split(prefix, "7,2,1", str(tmp_path / "part"))
    for part in ("train", "valid", "test"):
        stream = validation_stream(prefix, "7,2,1", part)
        assert validation_stream(str(tmp_path / f"part_{part}"), None).tolist() == stream.tolist()
        manifest = read_manifest(tmp_path / f"part_{part}")
        assert manifest.text_bytes is None
        assert manifest.tokens == len(stream)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    shares=st.tuples(*[st.integers(0, 50)] * 3).filter(any),
    block=st.integers(1, 40),
)
def test_splitting_and_merging_again(tmp_path_factory, lengths, shares, block):
    """The parts are whole documents, disjoint, in order, and together the corpus, byte for byte."""
    folder = tmp_path_factory.mktemp("split")
    prefix = str(folder / "c")
    with IndexedWriter(prefix, 300) as writer:
        writer.add(np.arange(sum(lengths), dtype=np.uint16), np.array(lengths, np.int32))
        writer.finish()
    text = ",".join(map(str, shares))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewriting, "_TOKENS_AT_ONCE", block)
        spans = split_spans(text, len(lengths))
        if any(span is not None and span[0] == span[1] for span in spans):
            with pytest.raises(UserError, match="leaves nothing for"):
                split(prefix, text, str(folder / "part"))
            return
        written = split(prefix, text, str(folder / "part"))
        parts = [files.prefix for files in written.values()]
        if len(parts) > 1:
            merge(parts, str(folder / "merged"))
    merged = folder / "merged" if len(parts) > 1 else parts[0]
    for ending in ("bin", "idx"):
        assert Path(f"{merged}.{ending}").read_bytes() == Path(f"{prefix}.{ending}").read_bytes()


@settings(max_examples=200, deadline=None)
@given(shares=st.lists(st.floats(0, 1e6), min_size=1, max_size=3).filter(any), documents=st.integers(0, 10**7))
def test_split_arithmetic(shares, documents):
    """Spans follow each other from 0 to the end, each within one document of its share."""
    spans = split_spans(",".join(map(repr, shares)), documents)
    present = [span for span in spans if span is not None]
    assert present[0][0] == 0
    assert present[-1][1] == documents
    assert all(left[1] == right[0] for left, right in itertools.pairwise(present))
    for share, span in zip(shares, spans, strict=False):
        size = 0 if span is None else span[1] - span[0]
        assert size >= 0
        assert abs(size - share / sum(shares) * documents) <= 1 + 1e-6 * documents


def test_other_types_of_ids(tmp_path):
    """int64 and uint8, as other programs write them, become the types that Megatron stores ids in."""
    import torch

    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    for dtype, stored in ((np.int64, "int32"), (np.uint8, "uint16"), (np.int32, "int32")):
        builder = IndexedDatasetBuilder(str(tmp_path / "foreign.bin"), dtype=dtype)
        for document in ([1, 2, 3], [4]):
            builder.add_document(torch.tensor(document), [len(document)])
        builder.finalize(str(tmp_path / "foreign.idx"))
        merge([str(tmp_path / "foreign")] * 2, str(tmp_path / "out"))
        assert contents(tmp_path / "out") == [[1, 2, 3], [4]] * 2
        assert check_indexed_files(tmp_path / "out").dtype.name == stored
        assert not manifest_path(tmp_path / "out").exists()


def test_errors(tmp_path):
    a, b = prepared(tmp_path, "a", "one two"), prepared(tmp_path, "b", "three")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match="at least two"):
        merge([a], str(tmp_path / "out"))
    with pytest.raises(UserError, match="is one of the inputs"):
        merge([a, b], f"{tmp_path}/../{tmp_path.name}/a_text_document")
    with pytest.raises(UserError, match="no data at"):
        merge([a, str(tmp_path / "absent")], str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"split '9,1' of .* \(2 documents\) leaves nothing for valid"):
        split(a, "9,1", str(tmp_path / "out"))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    manifest = read_manifest(b)
    write_manifest(b, Manifest(**{**vars(manifest), "tokenizer_fingerprint": "another"}))
    with pytest.raises(UserError, match=r"b_text_document was made with another tokenizer than .*a_text_document"):
        merge([a, b], str(tmp_path / "out"))
