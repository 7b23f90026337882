"""The evaluated text: token ids, documents and digests."""

import numpy as np
import pytest
import torch

from megatron.config import Config
from megatron.evaluation.protocols import Segments
from megatron.evaluation.text import Text, as_text, check_ids, corpus_name, text_by_document, validation_text
from megatron.utils.errors import UserError
from tests.support.checkpoints import settings_of, write_corpus


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A corpus whose validation third has 20 documents of 201 tokens."""
    return Config.from_flat(settings_of("none", write_corpus(tmp_path_factory.mktemp("data"))))


def test_as_text_accepts_tensors_arrays_and_lists():
    for tokens in ([3, 1, 2], np.array([3, 1, 2], dtype=np.uint16), torch.tensor([3, 1, 2], dtype=torch.int32)):
        text = as_text(tokens, 4)
        assert text.tokens.dtype == torch.int64
        assert text.tokens.tolist() == [3, 1, 2]
        assert text.documents is None
    text = Text(torch.tensor([3]))
    assert as_text(text, 4) is text


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([3, 4], "token id 4 is outside the vocabulary of 4"),
        ([-1, 3], "token id -1 is outside the vocabulary of 4"),
        ([[1]], r"vector of integers, not torch.int64 of shape \(1, 1\)"),
        ([True], "vector of integers"),
        ([0.5], "vector of integers"),
        (Text(torch.tensor([4])), "token id 4 is outside"),
    ],
)
def test_as_text_rejects_other_values(tokens, message):
    with pytest.raises(UserError, match=message):
        as_text(tokens, 4)


def test_ids_without_a_vocabulary():
    check_ids(torch.tensor([], dtype=torch.int64), 1)
    check_ids(torch.tensor([10**6]), None)
    with pytest.raises(UserError, match="token id -2 is outside the vocabulary: the text"):
        check_ids(torch.tensor([-2]), None)


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


def test_validation_text(config):
    text = validation_text(config, None)
    assert text.documents.tolist() == [201 * document for document in range(21)]
    assert text.corpus == "text"
    shorter = validation_text(config, 300)
    assert shorter.tokens.tolist() == text.tokens[:300].tolist()
    assert shorter.documents.tolist() == [0, 201, 300]


def test_text_by_document(config, capsys):
    text = text_by_document(config, 128, None)
    assert (text.row, len(text.tokens)) == (129, 20 * 129)
    assert text.documents.tolist() == [129 * document for document in range(21)]
    assert text.tokens[:129].tolist() == validation_text(config, 129).tokens.tolist()
    assert capsys.readouterr().out == ""
    text = text_by_document(config, 256, None)  # longer than any document
    assert len(text.documents) == 15 + 1
    assert "0 rows of 256 tokens come from one document each, 15 are concatenated" in capsys.readouterr().out


def test_corpus_names():
    assert corpus_name(["data/openwebtext2_text_document"]) == "openwebtext2"
    assert corpus_name(["a/github_document", "b/arxiv"]) == "github+arxiv"
