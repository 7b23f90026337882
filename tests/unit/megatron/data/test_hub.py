"""Text from the Hugging Face hub, by a stand-in for its package."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.data.chunks import Position
from megatron.data.documents import DocumentOptions, read_texts
from megatron.data.hub import HubCorpus
from megatron.data.indexed_format import check_indexed_files
from megatron.data.prepare import PrepareOptions, prepare
from megatron.utils.errors import UserError
from tests.support.texts import KINDS

TEXTS = [*KINDS.values(), "", "last"]


def text_of(prefix) -> str:
    return bytes(check_indexed_files(prefix).map_tokens().astype(np.uint8)).decode()


class FakeHub:
    """What HubCorpus uses of the package `datasets`; records how it was used."""

    def __init__(self, rows, sizes=None, fail_at=None):
        self.rows, self.sizes, self.fail_at, self.skipped = rows, sizes, fail_at, []

    def load_dataset_builder(self, name, config=None):
        if name == "owner/absent":
            raise FileNotFoundError("Couldn't find owner/absent\nat great length")
        builder = SimpleNamespace(base_path="hf://x@revision", info=SimpleNamespace(splits=self.sizes))
        builder.config = SimpleNamespace(data_files=None)
        builder.as_streaming_dataset = lambda split: FakeStream(self, self.rows)
        return builder


class FakeStream:
    def __init__(self, hub, rows):
        self.hub, self.rows = hub, rows
        self.column_names = list(HUB_ROWS[0])

    def select_columns(self, columns):
        return FakeStream(self.hub, [{column: row[column] for column in columns} for row in self.rows])

    def skip(self, count):
        self.hub.skipped.append(count)
        return FakeStream(self.hub, self.rows[count:])

    def __iter__(self):
        for number, row in enumerate(self.rows):
            if number == self.hub.fail_at:
                raise ConnectionError("lost")
            yield row


HUB_ROWS = [{"content": text, "meta": {"pile_set_name": "Github"}, "other": 1} for text in TEXTS]


def test_hub(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", FakeHub(HUB_ROWS))
    options = PrepareOptions("github", tmp_path, "CharLevelTokenizer", hub_name="owner/name", text_key="content")
    prefix = prepare(options)
    assert prefix == tmp_path / "github" / "github_text_document"  # what the recipe names, whatever the key
    assert text_of(prefix) == "".join(f"{text}\0" for text in TEXTS if text)


def test_hub_goes_on_at_every_row(monkeypatch):
    hub = FakeHub(HUB_ROWS)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    monkeypatch.setattr("megatron.data.hub._CHUNK_BYTES", 1)
    corpus = HubCorpus("owner/name", columns=("content", "meta"))
    for rows in range(len(TEXTS) + 1):
        chunks = corpus.chunks(Position(0, rows))
        assert list(read_texts(chunks, DocumentOptions(keys=("content",)))) == TEXTS[rows:]
    assert hub.skipped == list(range(1, len(TEXTS) + 1))
    assert corpus.identity() == HubCorpus("owner/name", columns=("content", "meta")).identity()
    assert corpus.identity() != HubCorpus("owner/name", split="test", columns=("content", "meta")).identity()


def test_hub_errors(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", FakeHub(HUB_ROWS, fail_at=3))
    with pytest.raises(UserError, match=r"^cannot open .* dataset owner/absent: Couldn't find owner/absent$"):
        HubCorpus("owner/absent")
    with pytest.raises(UserError, match=r"\(train\) has no column 'text'; its columns: content, meta, other"):
        HubCorpus("owner/name")
    with pytest.raises(UserError, match=r"owner/name \(train\), row 4: lost"):
        list(HubCorpus("owner/name", columns=("content",)).chunks())
