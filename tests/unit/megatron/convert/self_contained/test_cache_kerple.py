"""Generation with exported models in inference modes, with a cache of constant size."""

import pytest
import torch
import torch.nn.functional as F

from kerple.attention import parse_mode
from megatron.inference.generation import generate
from tests.support.checkpoints import TRAIN_LENGTH
from tests.support.conversion import random_tokens
from tests.support.errors import assert_rejected
from tests.support.exported import export, load

OPTIONS = {"do_sample": False, "eos_token_id": None}


@pytest.mark.parametrize(
    ("pos_emb", "name"), [("kerple_log", "sinks@2+8"), ("rotary", "sinks@2+8+reindexed")]
)
def test_a_cache_with_sinks_is_bounded(pos_emb, name):
    """The tokens of this project's model in the same mode, from a cache whose size
    stays constant.
    """
    model, path = export(
        pos_emb, **({"inference_mode": "sinks@2+8"} if pos_emb == "rotary" else {})
    )
    theirs, prompt, count = load(path, inference_mode=name), random_tokens(1, TRAIN_LENGTH), 60
    sizes = []

    def record_size(module, arguments, output):
        layers = output.past_key_values.layers
        sizes.append(
            sum(
                part.untyped_storage().nbytes()
                for layer in layers
                for part in (layer.keys, layer.values)
            )
        )

    theirs.register_forward_hook(record_size)
    tokens = theirs.generate(prompt, max_new_tokens=count, **OPTIONS)[0, TRAIN_LENGTH:].tolist()
    expected = generate(
        model, prompt.tolist(), maximum_tokens=count, mode=parse_mode(name).attention
    )
    assert tokens == expected[0].tokens
    layers, keys_and_values, hidden_size, bytes_per_number = 2, 2, 32, 4
    assert len(sizes) == count
    assert set(sizes) == {layers * keys_and_values * (2 + 7) * hidden_size * bytes_per_number}


@pytest.mark.parametrize(
    ("pos_emb", "name"), [("kerple_log", "sinks@2+8+linear"), ("dape_kerple", "window@8")]
)
def test_a_padded_batch(pos_emb, name):
    """Each row continues as if it were alone; the length of the text is that of the longest row."""
    model, path = export(pos_emb)
    theirs, rows = (
        load(path, inference_mode=name),
        (random_tokens(1, 40), random_tokens(1, 5, seed=2)),
    )
    prompts, mask = (
        torch.cat((rows[0], F.pad(rows[1], (35, 0)))),
        torch.ones(2, 40, dtype=torch.int64),
    )
    mask[1, :35] = 0
    generated = theirs.generate(prompts, attention_mask=mask, max_new_tokens=20, **OPTIONS)[:, 40:]
    mode = parse_mode(name, TRAIN_LENGTH).attention
    expected = generate(model, [row[0].tolist() for row in rows], maximum_tokens=20, mode=mode)
    assert generated.tolist() == [generation.tokens for generation in expected]
    assert_rejected(
        "KerpleForCausalLM.*recompute", generate, theirs, prompts.tolist(), maximum_tokens=20
    )


def test_generation_strategies():
    _, path = export("kerple_log")
    theirs, prompt = load(path, inference_mode="sinks@2+8"), random_tokens(2, 20)
    beams = {"num_beams": 3, "max_new_tokens": 12, **OPTIONS}
    assert torch.equal(
        theirs.generate(prompt, **beams), theirs.generate(prompt, use_cache=False, **beams)
    )
    for options, message in (
        ({"prompt_lookup_num_tokens": 2}, "prompt lookup need a mode without one"),
        (
            {"cache_implementation": "static"},
            "cache_implementation 'static' is not supported in an inference mode",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            theirs.generate(prompt[:1], max_new_tokens=4, **options, **OPTIONS)
    linear = load(path, inference_mode="full+linear")
    with pytest.raises(ValueError, match="without a cache"):
        linear.generate(prompt, max_new_tokens=4, use_cache=False, **OPTIONS)
    # Without a window, the cache can be cropped.
    clipped = load(path, inference_mode="full+clip@8")
    expected = clipped.generate(prompt[:1], max_new_tokens=12, **OPTIONS)
    assert torch.equal(
        clipped.generate(prompt[:1], max_new_tokens=12, prompt_lookup_num_tokens=2, **OPTIONS),
        expected,
    )
