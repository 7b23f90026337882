"""The last layers: the final norm, and the projection to the vocabulary, with the loss.

Legend: b batch, s tokens, e hidden size, v padded vocabulary.
"""

from torch import Tensor, nn

from megatron.model.block import make_norm
from megatron.model.linear import Linear
from megatron.model.loss import largest_piece, linear_cross_entropy
from megatron.model.parallel import column_linear, mean_loss, tensor_parallel_group
from megatron.model.settings import ModelSettings


class FinalNorm(nn.Module):
    """Layer L+3: `[b, s, e] -> [b, s, e]`."""

    def __init__(self, settings: ModelSettings):
        super().__init__()
        self.norm = make_norm(settings)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class VocabularyLinear(Linear):
    """`[..., e] -> [..., v]`; or with labels `[n]` hidden states `[n, e]` to the sum of their losses, by pieces.

    Both are calls of the module, because ZeRO 3 gathers the weight for as long as its module is called.
    """

    def forward(self, hidden: Tensor, labels: Tensor | None = None, counts: Tensor | None = None) -> Tensor:
        if labels is None:
            return super().forward(hidden)
        return linear_cross_entropy(hidden, self.weight, labels, counts)


class Output(nn.Module):
    """Layer L+4: `[b, s, e] -> [b, s, v / tensor-parallel size]`, without bias.

    Attributes:
        in_loss: hand the hidden states on, for a pipeline whose loss function calls `loss`.
    """

    def __init__(self, settings: ModelSettings):
        super().__init__()
        self.tp = settings.tp
        self.in_loss = False
        if self.tp.size == 1:
            self.final_linear = VocabularyLinear(settings.hidden_size, settings.padded_vocab_size, bias=False)
        else:
            self.final_linear = column_linear(
                settings.hidden_size, settings.padded_vocab_size, bias=False, tp=settings.tp
            )

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden if self.in_loss else self.final_linear(hidden)

    def loss(self, hidden: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
        """Mean cross entropy in nats over the tokens whose mask is not zero: hidden `[b, s, e]`, labels int64 and mask
        float `[b, s]`. Where the logits are many they are never whole.
        """
        weight = self.final_linear.weight
        # ZeRO 3 empties it outside of the module's call.
        vocabulary = getattr(weight, "ds_shape", weight.shape)[0]
        if labels.numel() * vocabulary <= largest_piece(hidden.device, vocabulary):
            return mean_loss(self.final_linear(hidden), labels, mask, self.tp)
        states, labels = hidden.flatten(0, 1), labels.flatten()
        counts = None if mask is None else mask.flatten()
        if self.tp.size == 1:
            total = self.final_linear(states, labels, counts)
        else:
            first, group = self.tp.rank * len(weight), tensor_parallel_group(self.tp)
            total = linear_cross_entropy(states, weight, labels, counts, first=first, group=group)
        return total / (labels.numel() if mask is None else mask.sum().clamp(min=1.0))
