"""Trials of a model's positional method on a CPU: one step on a short random text, which shows
whether the method runs in a dtype and which of its values and gradients are not finite; and whether
its hooks give the same values for parts.
"""

from collections.abc import Sequence

import torch

from kerple.attention import tables
from kerple.attention.part_check import part_problem
from kerple.positional import build_layers, project
from megatron.config.schema.model import ModelConfig
from megatron.model.gpt import GPT
from megatron.model.initialization import initialize
from megatron.model.settings import ModelSettings
from megatron.utils.errors import UserError

MAX_LENGTH, MAX_LAYERS, MAX_HIDDEN_SIZE, VOCABULARY = 32, 8, 256, 64


def _small(config: ModelConfig) -> ModelConfig:
    """The configuration with few narrow layers. The heads keep their size, on which the options of
    a rotation depend.
    """
    changes = {
        "num_layers": min(config.num_layers, MAX_LAYERS),
        "hidden_size": min(config.hidden_size, MAX_HIDDEN_SIZE),
        "intermediate_size": min(config.intermediate_size, 4 * MAX_HIDDEN_SIZE),
        "attention_backend": "auto",
    }
    return config.model_copy(update=changes)


def check_parts(config: ModelConfig) -> None:
    """Raises UserError for a positional method whose values depend on what else attention asks it
    for (see `part_problem`). Exceptions of the method are not caught.
    """
    small = _small(config)
    # Not the random numbers of the run.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        methods = build_layers(small.pos_emb, small.shape, **small.positional_options)
    for method in methods:
        # Parameters that begin at 0 would hide a dependence.
        with torch.no_grad():
            for parameter in method.parameters():
                parameter.add_(0.1)
            project(method)
        method.begin_step(0, length=config.seq_length)
        problem = part_problem(method, small.shape, config.seq_length)
        if problem is not None:
            raise UserError(f"pos_emb {config.pos_emb}: {problem}")


def trial_step(config: ModelConfig, dtype: torch.dtype) -> list[str]:
    """Compute the loss and all gradients in `dtype`, and return what is not finite of the
    positional method: values of its bias or weight, or else gradients of its parameters.

    The model is that of the configuration, but for a small vocabulary, at most 8 layers, and a
    hidden size of 256 at most, so that it fits into the memory of any machine. Exceptions of the
    positional method are not caught.
    """
    settings = ModelSettings(_small(config), VOCABULARY)
    model = GPT(settings)
    initialize(
        model.layers(),
        settings,
        seed=0,
        init_method=config.init_method,
        output_init_method=config.output_layer_init_method,
        std=config.init_method_std,
    )
    model.to(dtype)

    # Two different rows, of which the second one is reversed.
    length = min(config.seq_length, MAX_LENGTH)
    row = torch.arange(length + 1) % VOCABULARY
    tokens = torch.stack((row, row.flip(0)))
    methods = model.positional_methods().values()
    for method in methods:
        method.begin_step(0, length=length)
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    broken: dict[str, None] = {}
    if not loss.isfinite():
        # Then all gradients are not, whatever the cause.
        for method in methods:
            bias, weight = tables(method, length, "cpu")
            for name, table in (("bias", bias), ("weight", weight)):
                if table is not None and not table.isfinite().all():
                    broken[f"a {name}"] = None
        return list(broken)
    loss.backward()
    for method in methods:
        for name, parameter in method.named_parameters():
            if parameter.grad is not None and not parameter.grad.isfinite().all():
                broken[f"the gradient of {name}"] = None
    return list(broken)


def not_finite(pos_emb: str, names: Sequence[str]) -> str:
    """The cause of what `trial_step` has found."""
    return (
        f"{', '.join(names)} of pos_emb {pos_emb} is not finite even at the initial parameters. "
        "Usually the reason is distance 0, where a logarithm is infinite, and sqrt and powers "
        "below 1 have an infinite derivative: keep their arguments above 0 (see "
        "docs/adding-a-method.md)"
    )
