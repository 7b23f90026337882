"""DAPE's Figure 1: A, B and f(A, B) of one query equal the paper's formulas in float64, from the weights alone."""

import math

import numpy as np
import pytest
import torch

from megatron.config import UserError
from megatron.reporting.adaptive import adaptive_figure, figure_of, parts_of
from tests.support.checkpoints import write_checkpoint, write_corpus
from tests.support.language_models import VOCABULARY, small_gpt

LENGTH, HEADS, SIZE = 40, 4, 8


def model_of(pos_emb: str, **options: object):
    return small_gpt(pos_emb, seed=3, max_positions=16, pos_emb_options=tuple(options.items()))


@pytest.mark.parametrize(
    ("pos_emb", "options"),
    [
        ("dape_kerple", {}),
        ("dape_kerple", {"variant": "Concat"}),
        ("dape_alibi", {"variant": "Add_Residual"}),
        ("dape_fire", {}),
        ("dape", {}),
    ],
)
def test_parts_of_the_first_layer(pos_emb, options):
    model = model_of(pos_emb, **options)
    tokens = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(5))
    parts = parts_of(model, tokens)

    state = {name: value.double().numpy() for name, value in model.state_dict().items()}
    block = next(name for name in state if name.endswith("query_key_value.weight")).removesuffix(
        "attention.query_key_value.weight"
    )
    hidden = next(value for name, value in state.items() if name.endswith("word_embeddings.weight"))[tokens.numpy()]
    mean, variance = hidden.mean(1, keepdims=True), hidden.var(1, keepdims=True)
    normed = (hidden - mean) / np.sqrt(variance + 1e-5)
    normed = normed * state[f"{block}input_layernorm.weight"] + state[f"{block}input_layernorm.bias"]
    mixed = normed @ state[f"{block}attention.query_key_value.weight"].T
    mixed = (mixed + state[f"{block}attention.query_key_value.bias"]).reshape(LENGTH, HEADS, 3, SIZE)
    scores = np.einsum("hd,lhd->hl", mixed[-1, :, 0], mixed[:, :, 1]) / math.sqrt(SIZE)
    np.testing.assert_allclose(parts.scores.numpy(), scores, rtol=1e-4, atol=1e-4)

    rpe = {
        name.partition("rpe.")[2]: value for name, value in state.items() if name.startswith(f"{block}attention.rpe.")
    }
    distance = LENGTH - 1 - np.arange(LENGTH, dtype=np.float64)
    static = None
    if pos_emb == "dape_kerple":
        p, a = (np.maximum(rpe[f"static.bias_{name}"].reshape(-1, 1), 0.01) for name in "pa")
        static = -p * np.log(1 + a * distance)
    elif pos_emb == "dape_alibi":
        static = -(2.0 ** (-8 * np.arange(1, HEADS + 1) / HEADS)).reshape(-1, 1) * distance
    elif pos_emb == "dape_fire":
        static = parts.static.double().numpy()
        assert static.shape == scores.shape
        assert np.ptp(static) > 0
    if static is None:
        assert parts.static is None
        inputs = scores
    else:
        np.testing.assert_allclose(parts.static.numpy(), static, rtol=1e-4, atol=1e-4)
        inputs = scores + static if options.get("variant") == "Add_Residual" else np.concatenate([scores, static])
    middle = rpe["first.weight"] @ inputs + rpe["first.bias"][:, None]
    middle = np.where(middle > 0, middle, 0.01 * middle)
    expected = rpe["second.weight"] @ middle + rpe["second.bias"][:, None]
    np.testing.assert_allclose(parts.adapted.numpy(), expected, rtol=2e-4, atol=2e-4)

    figure = adaptive_figure(parts, of="x", name="x", heads=[2, 0])
    axes = figure.figure.axes
    assert len(axes) == (6 if static is not None else 4)
    for place, drawn in ((0, scores[2]), (1, scores[0]), (-2, expected[2]), (-1, expected[0])):
        np.testing.assert_allclose(axes[place].lines[0].get_ydata(), drawn, rtol=2e-4, atol=2e-4)
    assert "modify_scores" not in vars(next(m for m in model.modules() if hasattr(m, "variant"))), (
        "the model is as before"
    )


def test_other_methods_and_layers_are_refused():
    tokens = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(UserError, match="is not DAPE"):
        parts_of(model_of("alibi"), tokens)
    with pytest.raises(UserError, match="the layers 0 to 1"):
        parts_of(model_of("dape"), tokens, layer=2)


def test_a_checkpoint_s_figure(tmp_path):
    write_checkpoint(tmp_path, "dape_kerple", write_corpus(tmp_path))
    figure = figure_of(tmp_path, of="x", name="x")
    assert len(figure.figure.axes) == 9
    assert len(figure.figure.axes[0].lines[0].get_ydata()) == 16 * 32, "16 times the training length"
    write_checkpoint(tmp_path / "other", "alibi", str(tmp_path / "text_document"))
    assert figure_of(tmp_path / "other", of="x", name="x") is None
