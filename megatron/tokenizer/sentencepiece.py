"""SentencePiece models (the `tokenizer.model` of Llama 2, Mistral and others), with the sentencepiece library."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.tokenizer.tokenizer import END_OF_DOCUMENT, SpecialTokens, Tokenizer
from megatron.utils.errors import UserError, first_line, is_library_error
from megatron.utils.files import read_file


class SPMTokenizer(Tokenizer):
    """A SentencePiece model. Special tokens in a text are not recognized: `</s>` becomes ordinary pieces.

    Documents end with `<|endoftext|>` as in GPT-NeoX, or else with the model's own end-of-sequence piece. A
    tokenizer_config.json in the same folder decides whether texts start with the beginning-of-sequence piece, as it
    does for transformers; without the file they do not.

    Raises UserError if sentencepiece is not installed, the file is not a SentencePiece model, or has no end-of-document
    piece.
    """

    name = "SPMTokenizer"

    def __init__(self, path: Path):
        content = read_file(path)
        self._processor = _read(content, path)
        self.vocab_size = self._processor.get_piece_size()
        eod = self._processor.piece_to_id(END_OF_DOCUMENT)
        if eod == self._processor.unk_id():
            eod = self._processor.eos_id()
        if eod < 0:
            raise UserError(
                f"{path} has neither {END_OF_DOCUMENT} nor an end-of-sequence piece, so nothing can mark the end of a "
                "document"
            )
        self.eod = eod
        special = SpecialTokens.next_to(path)
        if special.largest_id >= self.vocab_size:
            raise UserError(
                f"{path} has {self.vocab_size} pieces, but tokenizer_config.json adds a token with id "
                f"{special.largest_id}; use the model's tokenizer.json with tokenizer-type HFTokenizer"
            )
        if special.adds_bos and self._processor.bos_id() >= 0:
            self.bos = self._processor.bos_id()
        self.fingerprint = hashlib.sha256(content + f"bos {self.bos}".encode()).hexdigest()

    def tokenize(self, text: str) -> list[int]:
        return self.tokenize_batch([text])[0]

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            rows = [self._processor.encode(text) for text in texts]
        except Exception as error:
            raise UserError(f"sentencepiece cannot encode the text: {first_line(error)}") from error
        return rows if self.bos is None else [[self.bos, *row] for row in rows]

    def detokenize(self, ids: Sequence[int]) -> str:
        # An untrained model may sample ids beyond the vocabulary.
        unknown = self._processor.unk_id()
        known = []
        for token in ids:
            known.append(int(token) if token < self.vocab_size else unknown)
        text: str = self._processor.decode(known)
        return text


def _read(content: bytes, path: Path) -> Any:
    """The library's processor."""
    try:
        import sentencepiece
    except ImportError as error:
        raise UserError(
            "tokenizer-type SPMTokenizer needs the sentencepiece library: pip install sentencepiece"
        ) from error
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        if processor.get_piece_size() < 1:
            raise ValueError("it has no pieces")
    except Exception as error:
        if not is_library_error(error):
            raise
        raise UserError(f"{path} is not a SentencePiece model: {first_line(error)}") from error
    return processor
