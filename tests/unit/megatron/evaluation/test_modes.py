"""Inference modes as users give them."""

import pytest

from kerple.attention import parse_mode
from megatron.evaluation.modes import UNSUPPORTED_NOTE, parse_modes
from megatron.inference.decoder import as_decoder
from tests.support.language_models import small_gpt


def test_each_mode_is_listed_once():
    modes = parse_modes(
        ["full+logn@128", "window@9", "full+logn", "blockwise@128"], train_length=128
    )
    assert [mode.name for mode in modes] == ["full+logn", "window@9", "blockwise"]


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({"pos_emb": "learned"}, "full+clip@8"),
        ({"pos_emb": "rotary", "sliding_window_width": 3}, "window@8"),
        ({"pos_emb": "alibi", "attention_backend": "sdpa"}, "sinks@2+8"),
    ],
)
def test_the_reason_for_an_unsupported_mode_can_be_recognized(settings, mode):
    """evaluate.py measures a mode again if the stored note starts like this, once the mode is
    supported.
    """
    reason = as_decoder(small_gpt(**settings)).unsupported_reason(parse_mode(mode, 32).attention)
    assert reason.startswith(UNSUPPORTED_NOTE)
