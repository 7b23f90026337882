"""Muon for matrices and Adam for the other parameters, compared with torch's two optimizers."""

import pytest
import torch

from megatron.optimizers.muon import MuonWithAdam

OPTIONS = {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-6, "momentum": 0.9, "nesterov": True}


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator))
        for shape in ((6, 4), (4, 6), (6,), (5, 4))
    ]


def test_each_part_updates_its_parameters_like_torch():
    wide, tall, bias, embedding = ours = parameters()
    groups = [
        {"params": [wide, tall], "weight_decay": 0.1, "matrices": True},
        {"params": [embedding], "weight_decay": 0.1},
        {"params": [bias], "weight_decay": 0.0, "lr_factor": 3.0},
    ]
    optimizer = MuonWithAdam(groups, **OPTIONS)
    reference = parameters()
    muon = torch.optim.Muon(
        reference[:2], lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(
        [
            {"params": [reference[3]], "weight_decay": 0.1},
            {"params": [reference[2]], "weight_decay": 0.0},
        ],
        lr=0.02,
        betas=(0.9, 0.99),
        eps=1e-6,
    )
    for number in range(20):
        for group in (*optimizer.param_groups, *muon.param_groups, *adam.param_groups):
            group["lr"] = 0.02 / (1 + number)  # a schedule changes the groups of the whole
        for parameter in (*ours, *reference):
            parameter.grad = parameter.detach().sin()
        optimizer.step()
        muon.step()
        adam.step()
    for parameter, expected in zip(ours, reference, strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("matrices", [True, False])
def test_one_part_is_enough(matrices):
    weight = torch.nn.Parameter(torch.eye(2))
    optimizer = MuonWithAdam(
        [{"params": [weight], **({"matrices": True} if matrices else {})}], **OPTIONS
    )
    weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert set(optimizer.state[weight]) == (
        {"momentum_buffer"} if matrices else {"step", "exp_avg", "exp_avg_sq"}
    )
