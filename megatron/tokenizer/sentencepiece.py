"""SentencePiece models (the `tokenizer.model` of Llama 2, Mistral and others), with the
sentencepiece library.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import sentencepiece

from megatron.tokenizer.interface import END_OF_DOCUMENT, SpecialTokens, Tokenizer
from megatron.utils.errors import UserError, library_errors
from megatron.utils.files import read_file


class SPMTokenizer(Tokenizer):
    """A SentencePiece model. Special tokens in a text are not recognized: `</s>` becomes ordinary
    pieces.

    Documents end with `<|endoftext|>` as in GPT-NeoX, or else with the model's own end-of-sequence
    piece. A tokenizer_config.json in the same folder decides whether texts start with the
    beginning-of-sequence piece, as it does for transformers; without the file they do not.

    Raises UserError if the file is not a SentencePiece model, or has no end-of-document piece.
    """

    name = "SPMTokenizer"

    def __init__(self, path: Path):
        content = read_file(path)
        with library_errors(f"{path} is not a SentencePiece model"):
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=content)
            self.vocab_size = self._processor.get_piece_size()
            if self.vocab_size < 1:
                raise ValueError("it has no pieces")
        eod = self._processor.piece_to_id(END_OF_DOCUMENT)
        if eod == self._processor.unk_id():
            eod = self._processor.eos_id()
        if eod < 0:
            raise UserError(
                f"{path} has neither {END_OF_DOCUMENT} nor an end-of-sequence piece, so nothing "
                "can mark the end of a document"
            )
        self.eod = eod

        # The tokenizer_config.json can add tokens, which the model does not have.
        special = SpecialTokens.next_to(path)
        if special.largest_id >= self.vocab_size:
            raise UserError(
                f"{path} has {self.vocab_size} pieces, but tokenizer_config.json adds a token with "
                f"id {special.largest_id}; use the model's tokenizer.json with tokenizer-type "
                "HFTokenizer"
            )
        if special.adds_bos and self._processor.bos_id() >= 0:
            self.bos = self._processor.bos_id()
        self.fingerprint = hashlib.sha256(content + f"bos {self.bos}".encode()).hexdigest()

    def tokenize(self, text: str) -> list[int]:
        with library_errors("sentencepiece cannot encode the text"):
            ids: list[int] = self._processor.encode(text)
        if self.bos is not None:
            ids.insert(0, self.bos)
        return ids

    @property
    def special_tokens(self) -> dict[int, str]:
        names = {}
        for token in range(self.vocab_size):
            if self._processor.is_control(token) or self._processor.is_unknown(token):
                names[token] = self._processor.id_to_piece(token)
        return names

    @property
    def unknown_id(self) -> int | None:
        unknown: int = self._processor.unk_id()
        return unknown

    def detokenize(self, ids: Sequence[int]) -> str:
        # An untrained model may sample ids beyond the vocabulary.
        unknown = self._processor.unk_id()
        known = []
        for token in map(int, ids):
            if token >= self.vocab_size:
                token = unknown
            known.append(token)
        text: str = self._processor.decode(known)
        return text
