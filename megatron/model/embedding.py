"""Layer 0: token embeddings, and positions where the method adds them to the embeddings.

Legend: b batch, s tokens, e hidden size.
"""

import torch
from torch import Tensor, nn

from kerple.positional import PositionalMethod
from megatron.model.parallel import vocab_embedding
from megatron.model.settings import ModelSettings


class Embedding(nn.Module):
    """int64 tokens `[b, s]` -> hidden `[b, s, e]`."""

    def __init__(self, settings: ModelSettings, positional: PositionalMethod):
        super().__init__()
        self.word_embeddings = vocab_embedding(settings.padded_vocab_size, settings.hidden_size, tp=settings.tp)
        if positional.embeds:
            self.position_embeddings = positional
        self.embeds = positional.embeds
        self.dropout = nn.Dropout(settings.hidden_dropout)

    def forward(self, tokens: Tensor, offset: int = 0) -> Tensor:
        """`offset` is the position of the first token."""
        hidden = self.word_embeddings(tokens)
        if self.embeds:
            positions = torch.arange(offset, offset + tokens.shape[1])
            hidden = self.position_embeddings.embed(hidden, positions)
        return self.dropout(hidden)
