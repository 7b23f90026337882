"""Training a BPE: against the algorithm written out, deterministic, byte-complete."""

import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import regex
import tokenizers

from megatron.tokenizer.training import train_bpe
from megatron.utils.errors import UserError
from tests.support.texts import KINDS

ROOT = Path(__file__).parents[4]


def test_merges_follow_the_algorithm():
    """Count adjacent pairs, merge the most frequent, again and again. On a corpus without ties."""
    text = "low " * 9 + "lower " * 6 + "newest " * 17 + "widest " * 4
    words = [list(word.replace(" ", "Ġ")) for word in regex.findall(r" ?\p{L}+", text)]
    expected = []
    for _ in range(4):
        pairs = Counter(pair for word in words for pair in itertools.pairwise(word))
        (best, count), (_, second) = pairs.most_common(2)
        if count == second:
            break
        expected.append(best)
        for word in words:
            position = 0
            while position < len(word) - 1:
                if (word[position], word[position + 1]) == best:
                    word[position : position + 2] = ["".join(best)]
                position += 1
    trained = train_bpe([text], 257 + max(len(expected), 1))
    ids = trained.get_vocab()
    assert expected
    assert [ids["".join(pair)] for pair in expected] == list(range(257, 257 + len(expected)))


def test_every_byte_and_the_special_token():
    trained = train_bpe(["aaab"], 257)
    assert trained.token_to_id("<|endoftext|>") == 0
    assert set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) <= set(trained.get_vocab())
    for text in KINDS.values():
        assert trained.decode(trained.encode(text).ids, skip_special_tokens=False) == text


def test_vocabulary_size_is_reached():
    assert train_bpe(KINDS.values(), 700).get_vocab_size() == 700


def test_the_same_in_another_process():
    program = (
        "from tests.support.texts import KINDS\n"
        "from megatron.tokenizer.training import train_bpe\n"
        "import hashlib; print(hashlib.sha256(train_bpe(KINDS.values(), 700).to_str().encode()).hexdigest())"
    )
    digests = {
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for _ in range(3)
    }
    assert len(digests) == 1


def test_too_small():
    with pytest.raises(UserError, match=r"vocabulary size 256 is too small: .*at least 257"):
        train_bpe(["a"], 256)
