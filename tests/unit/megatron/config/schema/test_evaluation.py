"""Keys of evaluation and text generation."""

import pytest

from megatron.config import Config, UserError


def test_lengths_and_tasks_are_lists(flat):
    config = Config.from_flat({**flat, "evaluation_lengths": [128, 512], "eval_tasks": ["lambada", "piqa"]})
    assert list(config.evaluation.lengths) == [128, 512]
    assert list(config.evaluation.eval_tasks) == ["lambada", "piqa"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eval_limit", 0),
        ("eval_tokens", 0),
        ("temperature", -0.1),
        ("top_p", 1.5),
        ("maximum_tokens", 0),
        ("num_samples", 0),
    ],
)
def test_values_out_of_range(flat, name, value):
    with pytest.raises(UserError, match=name):
        Config.from_flat({**flat, name: value})


def test_unknown_text_gen_type(flat):
    with pytest.raises(UserError, match="text_gen_type"):
        Config.from_flat({**flat, "text_gen_type": "poetry"})
