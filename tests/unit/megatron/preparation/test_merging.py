"""Merging datasets."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config import Config
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.data.indexed_dataset import data_fingerprint, read_manifest, write_manifest
from megatron.data.streams import part_documents
from megatron.preparation import merging
from megatron.preparation.documents import DocumentOptions
from megatron.preparation.indexed_writer import IndexedWriter
from megatron.preparation.input_files import find_files
from megatron.preparation.merging import merge
from megatron.preparation.preprocessing import preprocess
from megatron.preparation.readers import FileCorpus
from tests.support.checkpoints import settings_of
from tests.support.corpora import BYTE_TOKENIZER, json_lines
from tests.support.errors import assert_rejected


def build(folder, name, text, **options) -> str:
    """Build a dataset with one document per word of `text`."""
    path = folder / f"{name}.jsonl"
    path.write_bytes(json_lines(*text.split()))
    options = DocumentOptions(append_eod=True, **options)
    preprocess(
        FileCorpus(find_files([path])), folder / name, BYTE_TOKENIZER, options, inputs=[name]
    )
    return str(folder / f"{name}_text_document")


def test_merge(tmp_path):
    prefixes = [
        build(tmp_path, "a", "one two"),
        build(tmp_path, "b", "three"),
        build(tmp_path, "c", "four five"),
    ]
    written = merge(prefixes, str(tmp_path / "all"))
    manifest, parts = (
        read_manifest(tmp_path / "all"),
        [read_manifest(prefix) for prefix in prefixes],
    )
    assert (manifest.documents, manifest.tokens, manifest.sha256) == (
        written.documents,
        written.tokens,
        written.sha256,
    )
    assert (
        manifest.text_bytes == sum(part.text_bytes for part in parts) == len("onetwothreefourfive")
    )
    assert manifest.inputs == ["a", "b", "c"]


def test_documents_of_merged_datasets_are_those_of_their_parts(tmp_path):
    """Also of datasets that were merged twice, in training and evaluation alike."""
    first, second, third = (
        build(tmp_path, name, text)
        for name, text in (("a", "one two three"), ("b", "four"), ("c", "five six seven eight"))
    )
    inner, outer = str(tmp_path / "inner"), str(tmp_path / "outer")
    merge([second, third], inner)
    merge([first, inner], outer)
    identities = [data_fingerprint(prefix) for prefix in (first, second, third)]
    settings = settings_of("alibi", outer, split="5,3,0")
    config = Config.from_flat(settings, source="test")
    assert part_documents(config, "train") == dict(
        zip(identities, [(0, 3), (0, 1), (0, 1)], strict=True)
    )
    assert part_documents(config, "valid") == {identities[2]: (1, 4)}


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=12), min_size=2, max_size=4),
    block=st.integers(1, 13),
)
def test_merging_the_parts_of_a_corpus(tmp_path_factory, parts, block):
    """The result is the corpus byte for byte."""
    folder = tmp_path_factory.mktemp("merge")

    def write(name, documents, first=0) -> str:
        with IndexedWriter(folder / name, 300) as writer:
            writer.add(
                np.arange(first, first + sum(documents), dtype=np.uint16),
                np.array(documents, np.int32),
            )
            writer.finish()
            return writer.prefix

    whole = write("whole", list(itertools.chain(*parts)))
    starts = np.cumsum([0, *map(sum, parts)])
    prefixes = [write(f"part{number}", part, starts[number]) for number, part in enumerate(parts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "DOCUMENTS", block)
        merge(prefixes, str(folder / "merged"))
    for ending in ("bin", "idx"):
        assert (folder / f"merged.{ending}").read_bytes() == Path(f"{whole}.{ending}").read_bytes()


def test_errors(tmp_path):
    a, b = build(tmp_path, "a", "one two"), build(tmp_path, "b", "three")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert_rejected("at least two", merge, [a], str(tmp_path / "out"))
    same = f"{tmp_path}/../{tmp_path.name}/a_text_document"
    assert_rejected("a_text_document is given twice", merge, [a, b, same], str(tmp_path / "out"))
    assert_rejected("is one of the inputs", merge, [a, b], same)
    assert_rejected(
        r"^no data at (?!.*--set).*absent\.bin", merge, [a, "absent"], str(tmp_path / "out")
    )
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    manifest = read_manifest(b)
    write_manifest(b, replace(manifest, tokenizer_fingerprint="another"))
    assert_rejected("b_text_document.*a_text_document", merge, [a, b], str(tmp_path / "out"))
    # Earlier versions stored no other hash than that of the whole .bin.
    write_manifest(b, replace(manifest, idx_sha256=None, bin_sample=None))
    merge([a, b], str(tmp_path / "out"))
    written = {path.name: path.read_bytes() for path in tmp_path.glob("out*")}
    Path(f"{b}.bin").write_bytes(np.array([*b"seven", 0], np.uint16).tobytes())
    assert_rejected(r"b_text_document\.bin", merge, [a, b], str(tmp_path / "out"))
    assert {path.name: path.read_bytes() for path in tmp_path.glob("out*")} == written


def test_ids_that_the_result_cannot_have(tmp_path):
    """Datasets of other programs can have 64-bit ids."""
    prefixes = []
    for number, largest in enumerate((5, 2**32 + 7)):
        prefixes.append(str(tmp_path / str(number)))
        builder = IndexedDatasetBuilder(f"{prefixes[-1]}.bin", dtype=np.int64)
        builder.add_document(torch.tensor([1, largest]), [2])
        builder.finalize(f"{prefixes[-1]}.idx")
    assert_rejected(f"1.bin.*{2**32 + 7}", merge, prefixes, str(tmp_path / "out"))
    assert not list(tmp_path.glob("out*"))
