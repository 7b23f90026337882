"""The Python standard library and datasets of the Hugging Face hub (a fake of its package) as
corpora.
"""

import shutil
import sys
from types import SimpleNamespace

from megatron.preparation import corpora
from megatron.preparation.corpora import HubCorpus, StdlibCorpus, source_pieces
from megatron.preparation.documents import DocumentOptions, SkippedDocuments, read_texts
from megatron.preparation.readers import ReadPosition
from tests.support.corpora import TEXTS
from tests.support.errors import assert_rejected

# --- the standard library


def test_stdlib_corpus(tmp_path, monkeypatch):
    library = tmp_path / "library"
    contents = {"this.py": "a", "json/decoder.py": "b", "empty.py": "\n", "x.py": "c"}
    excluded = {
        "test/test_json.py": "no",
        "json/tests/test_x.py": "no",
        "site-packages/package.py": "no",
    }
    for name, content in {**contents, **excluded}.items():
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(content)
    (library / "latin.py").write_bytes(b"# caf\xe9\n")
    monkeypatch.setattr(corpora.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    corpus = StdlibCorpus()
    pieces = {name: content.decode() for name, content in corpus.documents}
    assert pieces == {"this.py:1": "a", "json/decoder.py:1": "b", "x.py:1": "c"}
    shutil.copytree(library, tmp_path / "copy")
    monkeypatch.setattr(corpora.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "copy")})
    assert StdlibCorpus().identity() == corpus.identity()
    assert list(StdlibCorpus().tokenizer_texts()) == list(corpus.tokenizer_texts())
    (tmp_path / "copy" / "x.py").write_text("changed")
    assert StdlibCorpus().identity() != corpus.identity()
    rest = [chunk.source for chunk in corpus.chunks(ReadPosition(0, 2))]
    assert rest == [name for name, _ in corpus.documents[2:]]


def test_pieces_of_a_file():
    functions = [b"def f%d():\n    pass\n\n\n" % index for index in range(5)]  # 21 bytes each
    assert list(source_pieces(b"".join(functions), 45)) == [
        (1, functions[0] + functions[1]),
        (9, functions[2] + functions[3]),
        (17, functions[4]),
    ]
    table = b"TABLE = [\n" + b"    1,\n" * 9 + b"]\n"  # without a blank line
    pieces = list(source_pieces(table, 30))
    assert b"".join(piece for _, piece in pieces) == table
    assert [line for line, _ in pieces] == [1, 4, 8]
    assert max(len(piece) for _, piece in pieces) <= 30
    assert list(source_pieces(b"x" * 100 + b"\ny\n", 30)) == [(1, b"x" * 100 + b"\n"), (2, b"y\n")]
    assert list(source_pieces(b"\n \n", 30)) == []


# --- the Hugging Face hub


class FakeHub:
    """The parts of the package `datasets` that HubCorpus uses. Records calls of `skip`."""

    def __init__(self, rows, sizes=None, fail_at=None):
        self.rows, self.sizes, self.fail_at, self.skipped = rows, sizes, fail_at, []

    def load_dataset_builder(self, name, config=None):
        if name == "owner/absent":
            raise FileNotFoundError("Couldn't find owner/absent\nwith more details")
        builder = SimpleNamespace(
            base_path="hf://x@revision", info=SimpleNamespace(splits=self.sizes)
        )
        builder.config = SimpleNamespace(data_files=None)
        builder.as_streaming_dataset = lambda split: FakeStream(self, self.rows)
        return builder


class FakeStream:
    def __init__(self, hub, rows):
        self.hub, self.rows = hub, rows
        self.column_names = list(ROWS[0])

    def select_columns(self, columns):
        return FakeStream(
            self.hub, [{column: row[column] for column in columns} for row in self.rows]
        )

    def skip(self, count):
        self.hub.skipped.append(count)
        return FakeStream(self.hub, self.rows[count:])

    def __iter__(self):
        for number, row in enumerate(self.rows):
            if number == self.hub.fail_at:
                raise ConnectionError("lost")
            yield row


ROWS = [{"content": text, "meta": {"pile_set_name": "Github"}, "other": 1} for text in TEXTS]
COLUMNS = ("content", "meta")


def test_hub_corpus_resumes_at_every_row(monkeypatch):
    hub = FakeHub(ROWS, {"train": SimpleNamespace(num_bytes=123)})
    monkeypatch.setitem(sys.modules, "datasets", hub)
    monkeypatch.setattr(corpora, "_HUB_CHUNK_BYTES", 1)
    corpus = HubCorpus("owner/name", columns=COLUMNS)
    assert corpus.total_bytes == 123
    for rows in range(len(TEXTS) + 1):
        chunks = corpus.chunks(ReadPosition(0, rows))
        texts = read_texts(chunks, DocumentOptions(keys=("content",)), SkippedDocuments())
        assert list(texts) == TEXTS[rows:]
    assert hub.skipped == list(range(1, len(TEXTS) + 1))
    assert corpus.identity() == HubCorpus("owner/name", columns=COLUMNS).identity()
    assert corpus.identity() != HubCorpus("owner/name", split="test", columns=COLUMNS).identity()


def test_sources_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert_rejected("contains no Python sources", StdlibCorpus)
    monkeypatch.setitem(sys.modules, "datasets", FakeHub(ROWS, fail_at=3))
    assert_rejected("owner/absent", HubCorpus, "owner/absent")
    assert_rejected("'text'", HubCorpus, "owner/name")
    assert_rejected("owner/name.*4", list, HubCorpus("owner/name", columns=("content",)).chunks())
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert_rejected("datasets.*'kerple-neox", HubCorpus, "owner/name")
