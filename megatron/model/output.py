"""The last layers: the final norm, and the projection to the vocabulary.

Legend: b batch, s tokens, e hidden size, v padded vocabulary.
"""

from torch import Tensor, nn

from megatron.model.block import make_norm
from megatron.model.parallel import column_linear
from megatron.model.settings import ModelSettings


class FinalNorm(nn.Module):
    """Layer L+3: `[b, s, e] -> [b, s, e]`."""

    def __init__(self, settings: ModelSettings):
        super().__init__()
        self.norm = make_norm(settings)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class Output(nn.Module):
    """Layer L+4: `[b, s, e] -> [b, s, v / tensor-parallel size]`, without bias."""

    def __init__(self, settings: ModelSettings):
        super().__init__()
        self.final_linear = column_linear(settings.hidden_size, settings.padded_vocab_size, bias=False, tp=settings.tp)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.final_linear(hidden)
