"""Muon for weight matrices, with Adam for all other parameters."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import AdamW, Muon, Optimizer


class MuonWithAdam(Optimizer):
    """torch's Muon for the parameter groups with the key "matrices", and torch's AdamW for the
    others.

    Muon's steps are scaled to the size of Adam's ("match_rms_adamw",
    https://arxiv.org/abs/2502.16982, section 2.2), so both use the same learning rate and weight
    decay. The parts share the groups and the state of this optimizer.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
        nesterov: bool,
    ):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        matrices = [group for group in self.param_groups if "matrices" in group]
        others = [group for group in self.param_groups if "matrices" not in group]
        self._parts: list[Optimizer] = []
        if matrices:
            self._parts.append(
                Muon(
                    matrices,
                    lr=lr,
                    momentum=momentum,
                    nesterov=nesterov,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        if others:
            self._parts.append(AdamW(others, lr=lr, betas=betas, eps=eps, fused=True))
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()
