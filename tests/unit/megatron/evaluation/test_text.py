"""The evaluated text: token ids, documents and digests."""

import json

import numpy as np
import pytest
import torch

from megatron.config import Config
from megatron.data.indexed_dataset import open_indexed_files, write_manifest
from megatron.data.streams import evaluation_stream
from megatron.evaluation.protocols import Segments
from megatron.evaluation.records import Provenance, parse_record
from megatron.evaluation.text import Text, as_text, check_range, corpus_name, evaluation_text
from megatron.tokenizer.tokenizer import CharLevelTokenizer
from tests.support.checkpoints import settings_of, write_corpus
from tests.support.corpora import manifest_of
from tests.support.errors import assert_rejected


def test_as_text_accepts_tensors_arrays_and_lists():
    for tokens in (
        [3, 1, 2],
        np.array([3, 1, 2], dtype=np.uint16),
        torch.tensor([3, 1, 2], dtype=torch.int32),
    ):
        text = as_text(tokens)
        assert text.tokens.dtype == torch.int64
        assert text.tokens.tolist() == [3, 1, 2]
        assert text.documents is None
    text = Text(torch.tensor([3]))
    assert as_text(text) is text


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        (as_text, ([[1]],), "torch"),
        (as_text, ([True],), "torch"),
        (as_text, ([0.5],), "torch"),
        (check_range, (-2, 5, None), "token id -2 is outside the vocabulary: the text"),
    ],
)
def test_rejected_texts(call, arguments, message):
    assert_rejected(message, call, *arguments)
    check_range(0, 10**6, None)


@pytest.mark.parametrize(("tokens", "invalid"), [([3, 4, 0], 4), ([-1, 3, 0], -1)])
def test_ids_outside_the_vocabulary(tokens, invalid):
    text = Text(torch.tensor(tokens))
    text.check_ids(4)  # nothing was read
    text.digest(Segments(1, [1]))
    if invalid == -1:
        text.check_ids(4)  # not read
    text.digest(Segments(2, [0]))
    assert_rejected(f"token id {invalid} is outside the vocabulary of 4", text.check_ids, 4)


def test_digests_identify_what_is_scored():
    tokens, documents = torch.arange(100), np.array([0, 30, 100])
    text, segments = Text(tokens, documents), Segments(8, [0, 16], 2)
    assert text.digest(segments) == Text(tokens.clone(), documents.copy()).digest(segments)
    changed = tokens.clone()
    changed[40] = 7  # not read
    assert Text(changed, documents).digest(segments) == text.digest(segments)
    changed[24] = 7  # the last target
    digests = {
        text.digest(segments),
        text.digest(Segments(8, [0, 16], 3)),
        text.digest(Segments(8, [0, 15], 2)),
        Text(changed, documents).digest(segments),
        Text(tokens, np.array([0, 10, 100])).digest(segments),
        Text(tokens).digest(segments),
        Text(tokens, documents, token_bytes=np.ones(100, dtype=np.int64)).digest(segments),
    }
    assert len(digests) == 7


def test_digests_identify_the_bytes_of_the_tokens():
    """Unless the data name their tokenizer: then the tokens determine them."""
    tokens, segments, ones = (
        torch.arange(100),
        Segments(8, [0, 16], 2),
        np.ones(100, dtype=np.int64),
    )
    unknown = [Text(tokens, token_bytes=count * ones).digest(segments) for count in (1, 1, 2)]
    assert unknown[0] == unknown[1] != unknown[2]
    known, also_known = (
        Text(tokens, token_bytes=count * ones, tokenizer_is_known=True).digest(segments)
        for count in (1, 2)
    )
    assert known == also_known
    assert known not in (*unknown, Text(tokens).digest(segments))


def test_the_tokenizer_of_the_text(tmp_path):
    prefix, tokenizer = write_corpus(tmp_path), CharLevelTokenizer()
    config = Config.from_flat(settings_of("none", prefix))
    text = evaluation_text(config, tokenizer)
    assert not text.tokenizer_is_known  # there is no manifest
    assert text.token_bytes.tolist() == tokenizer.byte_lengths().tolist()
    files = open_indexed_files(prefix)
    write_manifest(prefix, manifest_of(files, 255, tokenizer.fingerprint))
    assert evaluation_text(config, tokenizer).tokenizer_is_known
    write_manifest(prefix, manifest_of(files, 255, "other"))
    assert evaluation_text(config, None).token_bytes is None
    assert_rejected(r"text_document.*HFTokenizer.*CharLevel", evaluation_text, config, tokenizer)


def test_the_tokenizer_of_every_corpus_is_checked(tmp_path):
    folders = [tmp_path / "without a manifest", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    prefixes = list(map(write_corpus, folders))
    keys = settings_of("none", prefixes[0])
    keys = {**keys, "data_path": None, "train_data_paths": prefixes, "valid_data_paths": prefixes}
    config = Config.from_flat(keys)
    assert not evaluation_text(config, CharLevelTokenizer()).tokenizer_is_known
    write_manifest(prefixes[1], manifest_of(open_indexed_files(prefixes[1]), 255, "other"))
    assert_rejected(
        r"other/text_document.*HFTokenizer", evaluation_text, config, CharLevelTokenizer()
    )


def test_evaluation_text(tmp_path):
    config = Config.from_flat({**settings_of("none", write_corpus(tmp_path)), "split": "1,1,1"})
    text = evaluation_text(config)
    assert text.documents.tolist() == [201 * document for document in range(21)]
    assert (text.corpus, len(text.tokens)) == ("text", 20 * 201)
    test_split = evaluation_text(config, part="test")
    assert test_split.corpus == "text (test split)"
    assert (
        test_split.tokens[:].tolist()
        == evaluation_stream(config, "test")[0][:].tolist()
        != text.tokens[:].tolist()
    )


def test_corpus_names():
    assert corpus_name(["data/openwebtext2_text_document"]) == "openwebtext2"
    assert corpus_name(["a/github_document", "b/arxiv"]) == "github+arxiv"


def test_a_long_corpus_name_fits_into_a_record():
    for part, ending in (("valid", ""), ("test", " (test split)")):
        name = corpus_name([f"corpus{number}" for number in range(100)], part)
        assert name.startswith("corpus0+corpus1")
        assert name.endswith(ending)
        record = Provenance().record(
            "effective_length", corpus=name, mode="full", protocol="p", length=1, determined_by=0
        )
        values = {**record, "layers": ["all layers"], "effective_lengths": [[1]]}
        assert parse_record(json.dumps(values).encode(), "x")["corpus"] == name
