"""KERPLE (log), started at ALiBi's slopes: does log lose to ALiBi because no head starts steep?"""

import torch

from kerple.positional.alibi import alibi_slopes
from kerple.positional.kerple import KerpleLog
from kerple.positional.registry import register

START = 1 / 16  # of a: log(1 + a δ) is close to a δ up to some tokens


@register("kerple_log_steep")
class KerpleLogSteep(KerpleLog):
    """Bias -p log(1 + a δ) with a = 1/16 and p = 16 times ALiBi's slopes at the start."""

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        slopes = torch.tensor(alibi_slopes(self.num_heads))
        with torch.no_grad():
            self.get_parameter("bias_a").fill_(START)
            self.get_parameter("bias_p").copy_((slopes / START).reshape(-1, 1, 1))
