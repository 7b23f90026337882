"""Masks, packed rows and padding of transformers."""

import contextlib
import copy
import threading
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    BartForCausalLM,
    CLIPVisionConfig,
    DataCollatorWithFlattening,
    DynamicCache,
    LlavaConfig,
    LlavaForConditionalGeneration,
    StaticCache,
    masking_utils,
)

from kerple.attention import position_tables
from kerple.transformers import use_positional
from kerple.transformers.attention import PROBES
from kerple.transformers.mask import CALLS, attention_mask, dense_mask
from tests.support.model_families import (
    FAMILIES,
    OLDEST,
    TOLERANCE,
    VOCABULARY,
    family_inputs,
    family_model,
    method_of,
    outputs,
    with_reference,
)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "llama4_text"])
@torch.no_grad()
def test_packed_rows(name):
    """Positions that restart give what the texts give alone."""
    if OLDEST and name == "llama4_text":
        pytest.skip("the chunks of Llama 4 are wrong for packed rows in transformers 5.0")
    model = family_model(name)
    use_positional(model, "kerple_log")
    texts = [torch.randint(3, VOCABULARY, (1, length)) for length in (9, 4, 7)]
    positions = torch.cat([torch.arange(text.shape[1]) for text in texts])[None]
    packed = model(torch.cat(texts, dim=1), position_ids=positions, use_cache=False)[0]
    alone = torch.cat([model(text, use_cache=False)[0] for text in texts], dim=1)
    assert (packed - alone).abs().max() / alone.std() < 1e-5


@torch.no_grad()
def test_padding_between_tokens_has_no_distance():
    """With its own positions counted by the mask, a text with gaps is the text without them."""
    model = family_model("llama")
    use_positional(model, "kerple_log")
    text = torch.randint(3, VOCABULARY, (1, 9))
    places = [0, 1, 2, 5, 6, 8, 9, 10, 11]
    tokens = torch.zeros(1, 12, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    tokens[:, places], mask[:, places] = text, 1
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    found = model(tokens, attention_mask=mask, position_ids=positions)[0][:, places]
    assert (found - model(text)[0]).abs().max() < 1e-4


@torch.no_grad()
def test_masks_of_ones_own():
    """A prefix that all tokens see, as a mask of bools or one that is added."""
    model = family_model("llama").double()
    plain = copy.deepcopy(model)
    use_positional(model, "kerple_log")
    model.kerple_positional.double()
    reference = with_reference(plain, method_of(model))
    tokens = family_inputs(model)["input_ids"]
    sees = torch.ones(3, 1, 12, 12, dtype=torch.bool).tril()
    sees[..., :5] = True
    added = torch.zeros(sees.shape, dtype=torch.float64).masked_fill(~sees, -1e30)
    expected = reference(tokens, attention_mask=added)[0]
    for mask in (sees, added):
        found = model(tokens, attention_mask=mask)[0]
        assert (found - expected).abs().max() / expected.std() < TOLERANCE
    use_positional(model, "dape_kerple")
    with pytest.raises(NotImplementedError, match="mask"):
        model(tokens, attention_mask=sees)


@torch.no_grad()
def test_branches_of_a_text_in_a_mask():
    """Their distances are not those of the places. Texts and padding in a mask are no branches."""
    model = family_model("llama")
    use_positional(model, "kerple_log")
    tokens = family_inputs(model)["input_ids"][:, :6]
    sees = torch.ones(3, 1, 6, 6, dtype=torch.bool).tril()
    branches = sees.clone()
    branches[..., 4:, 2:4] = False  # places 2, 3 and 4, 5 follow place 1
    positions = torch.tensor([[0, 1, 2, 3, 2, 3]])
    added = torch.zeros(branches.shape).masked_fill(~branches, -1e9)
    for mask in (branches, added):
        with pytest.raises(ValueError, match="position_ids"):
            model(tokens, attention_mask=mask, position_ids=positions)
        cache = model(tokens[:, :2], use_cache=True).past_key_values
        later = {"attention_mask": mask[:, :, [2, 4]][..., [0, 1, 2, 4]]}
        later["position_ids"] = torch.tensor([[2, 2]])
        with pytest.raises(ValueError, match="position_ids"):
            model(tokens[:, [2, 4]], past_key_values=cache, **later)

    # Two texts, and padding on both sides.
    texts, padded = sees.clone(), sees.clone()
    texts[..., 3:, :3] = False
    padded[..., :1] = padded[..., 5:] = False
    for mask, places in ((texts, [0, 1, 2, 0, 1, 2]), (padded, [1, 0, 1, 2, 3, 1])):
        model(tokens, attention_mask=mask, position_ids=torch.tensor([places]))


def test_a_model_that_is_called_within_another():
    """Before the other one makes its mask: what the other one's inputs ask for is not forgotten."""
    model, inner = family_model("llama"), family_model("gpt2")
    for each in (model, inner):
        use_positional(each, "kerple_log")
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda *_: inner(torch.tensor([[5, 6, 7]])) and None)
    tokens, positions = torch.randint(3, 99, (1, 6)), torch.tensor([[0, 1, 2, 0, 1, 2]])
    with pytest.raises(ValueError, match="several texts"):
        model(tokens, position_ids=positions)
    separate = model(tokens, position_ids=positions, use_cache=False)[0]
    alone = model(tokens[:, 3:])[0]
    assert (separate[:, 3:] - alone).abs().max() / alone.std() < 1e-5


class Interrupted(BaseException):
    """As KeyboardInterrupt, which torch does not catch."""


@pytest.mark.parametrize("layers", [None, [1]])
def test_parameters_are_kept_within_their_bounds(layers):
    """At the start of a forward pass in training mode, but never between it and its backward."""
    model = family_model("llama")
    use_positional(model, "kerple_log", layers=layers)
    parameter = method_of(model).bias_p
    low, _ = method_of(model).bounds()["bias_p"]
    inputs = family_inputs(model)
    with torch.no_grad():
        parameter[1] = -3.0
    outputs(model, inputs)
    assert parameter[1] == -3.0
    model.train()
    losses = [model(**inputs, labels=inputs["input_ids"]).loss for _ in range(2)]
    assert parameter[1] == low
    assert (parameter >= low).all()
    sum(losses).backward()
    assert parameter.grad.isfinite().all()


def test_tables_are_computed_once_for_all_layers(monkeypatch):
    model = family_model("llama")
    use_positional(model, "kerple_log")
    counted = Mock(wraps=position_tables)
    monkeypatch.setattr("kerple.transformers.mask.position_tables", counted)
    monkeypatch.setattr("kerple.attention.attention.position_tables", counted)
    outputs(model, family_inputs(model, "left"))
    assert counted.call_count == 1


def test_each_thread_has_its_own_calls_and_probes():
    found = []

    def observe():
        found.extend((PROBES.function, len(CALLS.stack)))

    PROBES.function = observe
    CALLS.stack.append(CALLS.last)
    try:
        thread = threading.Thread(target=observe)
        thread.start()
        thread.join()
    finally:
        PROBES.function = None
        CALLS.stack.pop()
    assert found == [None, 1]


def test_a_call_that_was_interrupted():
    model = family_model("llama")
    use_positional(model, "kerple_log")
    tokens, positions = torch.randint(3, 99, (1, 6)), torch.tensor([[0, 1, 2, 0, 1, 2]])

    def interrupt(*_):
        raise Interrupted

    # A call with one text, then the body with two; and the reverse.
    expected = model.model(tokens)[0]
    for first, second in (({}, {"position_ids": positions}), ({"position_ids": positions}, {})):
        handle = model.model.norm.register_forward_hook(interrupt)
        with pytest.raises(Interrupted):
            model(tokens, **first, use_cache=False)
        handle.remove()
        if second:
            with pytest.raises(ValueError, match="several texts"):
                model.model(tokens, **second)
        else:
            assert torch.equal(model.model(tokens)[0], expected)


def test_a_forward_that_takes_anything():
    model = family_model("llama")
    use_positional(model, "kerple_log")
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    tokens, positions = torch.randint(3, 99, (1, 6)), torch.tensor([[0, 1, 2, 0, 1, 2]])
    with pytest.raises(ValueError, match="several texts"):
        model(tokens, position_ids=positions)


def test_a_window_of_no_tokens():
    """The default of Qwen2-MoE, whose layers see all earlier tokens."""
    visible = attention_mask(
        1, 5, 5, mask_function=lambda *at: at[3] <= at[2], local_size=0
    ).visible
    assert (visible.window, visible.causal, visible.dense) == (None, True, None)


@torch.no_grad()
def test_a_mask_with_unused_keys():
    """The places of the queries are not known: as with a static cache that is not full."""
    model = family_model("llama")
    use_positional(model, "kerple_log")
    cache = StaticCache(config=model.config, max_cache_len=16)
    tokens = family_inputs(model)["input_ids"]
    sees = torch.ones(3, 1, 12, 16, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="static"):
        model(tokens, attention_mask=sees, past_key_values=cache)
    expected = model(tokens)[0]
    found = model(tokens, attention_mask=sees[..., :12])[0]
    assert (found - expected).abs().max() < 1e-4


@torch.no_grad()
def test_a_mask_with_a_cache_that_keeps_a_window():
    """Its layers have fewer keys than the mask."""
    model = family_model("mistral")
    use_positional(model, "alibi")
    cache = DynamicCache(config=model.config)
    tokens = family_inputs(model)["input_ids"]
    sees = torch.ones(3, 1, 12, 12, dtype=torch.bool).tril()
    model(tokens[:, :8], attention_mask=sees[..., :8, :8], past_key_values=cache)
    with pytest.raises(ValueError, match="window"):
        model(tokens[:, 8:], attention_mask=sees[..., 8:, :], past_key_values=cache)


@torch.no_grad()
def test_places_in_a_cache_that_keeps_a_window():
    """Not known, and FIRE needs them beyond its threshold."""
    model = family_model("mistral")
    use_positional(model, "fire", threshold=2.0)
    for parameter in model.kerple_positional.parameters():
        parameter.mul_(3)
    tokens = family_inputs(model)["input_ids"]
    expected = model(tokens, use_cache=False)[0][:, 9:]
    for cache in (DynamicCache(), DynamicCache(config=model.config)):
        model(tokens[:, :9], past_key_values=cache)
        if cache.layers[0].is_sliding:
            with pytest.raises(NotImplementedError, match="DynamicCache"):
                model(tokens[:, 9:], past_key_values=cache)
        else:
            found = model(tokens[:, 9:], past_key_values=cache)[0]
            assert (found - expected).abs().max() / expected.std() < 1e-5


@torch.no_grad()
def test_padding_that_the_model_makes_a_mask_of():
    """Between tokens, it has no distance."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
    config = AutoConfig.for_model("layoutlm", **sizes, num_attention_heads=4, intermediate_size=64)
    model = AutoModel.from_config(config).eval()
    use_positional(model, "kerple_log", own_positions="keep")
    tokens = torch.randint(3, VOCABULARY, (2, 6))
    kept = torch.tensor([0, 1, 4, 5, 6, 9])
    longer, mask, positions = torch.zeros(3, 2, 10, dtype=torch.int64)
    longer[:, kept], mask[:, kept], positions[:, kept] = tokens, 1, torch.arange(6)
    expected = model(tokens)[0]
    found = model(longer, attention_mask=mask, position_ids=positions)[0][:, kept]
    assert (found - expected).abs().max() < 1e-5
    with pytest.raises(ValueError, match="position_ids"):
        model(tokens, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "bert"])
@torch.no_grad()
def test_texts_that_are_not_separated(name):
    """transformers separates none with a cache or a mask, and some models never do."""
    model = family_model(name)
    use_positional(model, "kerple_log")
    tokens = family_inputs(model)["input_ids"][:1]
    ones = torch.ones_like(tokens)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4]])
    calls: list[dict[str, object]] = [{}, {"attention_mask": ones}]
    if name in ("opt", "bert"):
        calls.append({"use_cache": False})
    for options in calls:
        with pytest.raises(ValueError, match="position_ids"):
            model(tokens, position_ids=positions, **options)
    # The numbers of texts, and 0 for tokens.
    for other in (ones + (positions < 2), torch.where(positions < 2, -1e4, 0.0)):
        with pytest.raises(ValueError, match="attention_mask"):
            model(tokens, attention_mask=other)
    padded = ones.index_fill(1, torch.arange(3), 0)
    model(tokens, attention_mask=padded, position_ids=(padded.cumsum(1) - 1).clamp(min=0))


@pytest.mark.parametrize("option", ["return_flash_attn_kwargs", "return_seq_idx"])
@torch.no_grad()
def test_texts_that_the_collator_announces_without_positions(option):
    model = family_model("llama")
    use_positional(model, "kerple_log")
    texts = [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9, 10, 11]}]
    for texts_of_row in (texts, texts[:1]):
        for positions in (True, False):
            collator = DataCollatorWithFlattening(return_position_ids=positions, **{option: True})
            batch = collator(texts_of_row)
            if len(texts_of_row) == 1 or positions:
                found = model(**batch, use_cache=False).logits
                alone = [model(torch.tensor([text["input_ids"]])).logits for text in texts_of_row]
                torch.testing.assert_close(found, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-4)
            else:
                with pytest.raises(ValueError, match="position_ids"):
                    model(**batch, use_cache=False)


@pytest.mark.parametrize("name", ["bart", "t5"])
@torch.no_grad()
def test_a_mask_of_an_encoder_alone(name):
    model = family_model(name)
    use_positional(model, "alibi")
    tokens = family_inputs(model)["input_ids"]
    for numbers, is_valid in ((torch.ones_like(tokens), True), (1 + tokens % 2, False)):
        with contextlib.nullcontext() if is_valid else pytest.raises(ValueError, match="position"):
            model.get_encoder()(tokens, attention_mask=numbers)


@torch.no_grad()
def test_texts_of_a_part_are_not_separated():
    """The language model in a model of images and texts, called alone."""
    text = AutoConfig.for_model("llama", **FAMILIES["llama"])
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1}
    vision = CLIPVisionConfig(**sizes, num_attention_heads=4, image_size=16, patch_size=8)
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=VOCABULARY - 1,
        vision_feature_layer=-1,
    )
    model = LlavaForConditionalGeneration(config).eval()
    use_positional(model, "kerple_log")
    tokens, positions = torch.randint(3, 90, (1, 12)), torch.tensor([[0, 1, 2, 3, 4, 5] * 2])
    for called in (model, model.model.language_model):
        with pytest.raises(ValueError, match="position_ids"):
            called(input_ids=tokens, position_ids=positions)
        separate = called(input_ids=tokens, position_ids=positions, use_cache=False)[0][:, 6:]
        alone = called(input_ids=tokens[:, 6:])[0]
        assert (separate - alone).abs().max() / alone.std() < 1e-5


@torch.no_grad()
def test_texts_with_coordinates_are_not_separated():
    """Positions of Qwen2-VL, `[3, b, s]`, of two texts, and of one after padding."""
    config = AutoConfig.for_model("qwen2_vl_text", **FAMILIES["qwen2"])
    config.rope_parameters = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    model = AutoModel.from_config(config).eval()
    use_positional(model, "kerple_log")
    tokens, mask = torch.randint(3, 90, (1, 12)), torch.ones(1, 12, dtype=torch.int64)
    packed = torch.tensor([[[0, 1, 2, 3, 4, 5] * 2]]).expand(3, -1, -1)
    for options in ({}, {"attention_mask": mask}):
        with pytest.raises(ValueError, match="position_ids"):
            model(tokens, position_ids=packed, **options)
    mask[:, :6] = 0
    padded = packed.masked_fill(mask == 0, 1)
    model(tokens, position_ids=padded, attention_mask=mask)


@torch.no_grad()
def test_texts_around_padding_are_not_separated():
    model = family_model("llama")
    use_positional(model, "kerple_log")
    tokens = family_inputs(model)["input_ids"][:1]
    mask = torch.ones_like(tokens).index_fill(1, torch.tensor([5]), 0)
    restarting = torch.tensor([[0, 1, 2, 3, 4, 9, 0, 1, 2, 3, 4, 5]])
    with pytest.raises(ValueError, match="position_ids"):
        model(tokens, attention_mask=mask, position_ids=restarting)
    model(tokens, attention_mask=mask, position_ids=torch.arange(12)[None])


@torch.no_grad()
def test_a_text_of_one_token_and_texts_after_a_cache_are_not_separated():
    model = family_model("llama")
    use_positional(model, "kerple_log")
    tokens, mask = torch.randint(3, 90, (1, 8)), torch.ones(1, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match="position_ids"):
        model(tokens[:, :4], position_ids=torch.tensor([[0, 0, 1, 2]]))
    # The padding is that of earlier tokens.
    mask[:, :2] = 0
    cache = DynamicCache()
    model(tokens[:, :4], attention_mask=mask[:, :4], past_key_values=cache)
    restarting = {"position_ids": torch.tensor([[2, 3, 0, 1]]), "past_key_values": cache}
    with pytest.raises(ValueError, match="position_ids"):
        model(tokens[:, 4:], attention_mask=mask, **restarting)


# The first padding is on the left, then between tokens, then on the right.
PADDING = torch.ones(4, 12, dtype=torch.int64)
PADDING[1, :7], PADDING[2, 3:5], PADDING[3, 8:] = 0, 0, 0
WINDOW_OF_4 = masking_utils.sliding_window_causal_mask_function(4)


@pytest.mark.parametrize("padding", [None, PADDING, PADDING[:, :10]])
@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (masking_utils.causal_mask_function, (12, 12, 0, 0)),
        (masking_utils.causal_mask_function, (2, 12, 10, 0)),
        (masking_utils.causal_mask_function, (3, 16, 9, 0)),
        (masking_utils.bidirectional_mask_function, (12, 12, 0, 0)),
        (masking_utils.bidirectional_mask_function, (5, 12, 0, 0)),
        (WINDOW_OF_4, (12, 12, 0, 0)),
        (WINDOW_OF_4, (2, 5, 10, 7)),
        (lambda row, head, query, key: (key <= query) & (key != 4), (12, 12, 0, 0)),
        (lambda row, head, query, key: (key <= query) & (key != 9), (2, 5, 10, 7)),
        (
            lambda row, head, query, key: (key <= query) | ((query == 3) & (key == 4)),
            (12, 12, 0, 0),
        ),
    ],
)
def test_masks_are_those_of_their_functions(function, sizes, padding):
    """Pair by pair, also with unused keys, and keys that a cache has dropped."""
    q_length, kv_length, q_offset, kv_offset = sizes
    visible = attention_mask(
        4, q_length, kv_length, q_offset, kv_offset, function, padding, local_size=4
    ).visible
    used = visible.kv_len
    assert used == min(kv_length, 12 - kv_offset)
    is_text = torch.ones(4, 12, dtype=torch.bool)
    if padding is not None:
        is_text = F.pad(padding, (0, 12 - padding.shape[1])).bool()
    is_text = is_text[:, kv_offset : kv_offset + used]
    query = torch.arange(q_offset, q_offset + q_length)[:, None]
    key = torch.arange(kv_offset, kv_offset + used)
    seen = torch.as_tensor(function(0, 0, query, key)) & is_text[:, None]

    found = visible.dense
    if found is None:
        found = dense_mask(visible, visible.device, is_cross=q_length == 5)
    found = found.expand(4, 1, q_length, used)[:, 0]
    # Queries that are padding see anything.
    places = slice(q_offset - kv_offset, q_offset - kv_offset + q_length)
    is_query = is_text[:, places, None]
    assert torch.equal(found & is_query, seen & is_query)

    # Windows of the backends do not count padding, those of transformers do.
    if visible.window is not None and visible.documents is not None:
        between = is_text[:, 1:] & ~is_text[:, :-1] & is_text.cumsum(dim=1)[:, :-1].bool()
        assert not between.any()

    # Distances do not count padding.
    positions = visible.positions
    if visible.documents is not None:
        positions = visible.documents.positions
    if positions is None:
        positions = torch.arange(used).expand(4, -1)
    count = is_text.cumsum(dim=1) - 1
    assert torch.equal(positions[is_text], count[is_text])


@pytest.mark.parametrize("lengths", [(2, 8, 2), (3, 7, 2), (12,), (1, 1, 9, 1)])
@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
@torch.no_grad()
def test_a_window_in_packed_rows(name, lengths):
    """Also if the first, middle and last tokens are in texts that are shorter than the window."""
    model = family_model(name)
    use_positional(model, "kerple_log")
    tokens = family_inputs(model)["input_ids"][:1]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    found = model(tokens, position_ids=positions, use_cache=False)[0]
    expected = [model(text)[0] for text in tokens.split(lengths, dim=1)]
    assert (found - torch.cat(expected, dim=1)).abs().max() < 1e-4


@torch.no_grad()
def test_a_mask_of_keys_with_other_values():
    """Added to the scores of all queries, they are no padding."""
    model = family_model("llama")
    use_positional(model, "kerple_log")
    tokens = family_inputs(model)["input_ids"]
    added = torch.randn(3, 1, 1, 12)
    whole = added.expand(-1, -1, 12, -1).contiguous()
    found = model(tokens, attention_mask=added)[0]
    expected = model(tokens, attention_mask=whole)[0]
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["bart", "t5"])
@torch.no_grad()
def test_cross_attention_to_as_many_keys_as_queries(name):
    model = family_model(name)
    inputs = family_inputs(model, "right")
    inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (3, 12))
    expected = outputs(model, inputs)
    use_positional(model, "none")
    assert (outputs(model, inputs) - expected).abs().max() / expected.std() < 1e-5


@torch.no_grad()
def test_the_decoder_of_an_encoder_decoder_alone():
    model = BartForCausalLM(AutoConfig.for_model("bart", **FAMILIES["bart"])).eval()
    tokens = torch.randint(3, VOCABULARY, (2, 12))
    expected = model(tokens).logits
    use_positional(model, "none")
    assert (model(tokens).logits - expected).abs().max() / expected.std() < 1e-5
    # Its cross-attention, to as many keys as there are queries.
    states = {"encoder_hidden_states": torch.randn(2, 12, 32)}
    states["encoder_attention_mask"] = (torch.arange(12) < torch.tensor([[12], [7]])).long()
    attended = model(tokens, **states).logits
    use_positional(model, None)
    assert (model(tokens, **states).logits - attended).abs().max() / attended.std() < 1e-5
    use_positional(model, "alibi", own_positions="remove")
    assert (model(tokens).logits - expected).abs().max() / expected.std() > 1e-3


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@torch.no_grad()
def test_cross_attention_of_a_decoder_alone(name):
    model = family_model(name, is_decoder=True, add_cross_attention=True)
    inputs = family_inputs(model)
    inputs["encoder_hidden_states"] = torch.randn(3, 12, 32)
    inputs["encoder_attention_mask"] = torch.ones(3, 12, dtype=torch.int64)
    inputs["encoder_attention_mask"][1, 7:] = 0
    expected = outputs(model, inputs)
    use_positional(model, "none")
    assert (outputs(model, inputs) - expected).abs().max() / expected.std() < 1e-5


@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
@torch.no_grad()
def test_probabilities_with_padding_between_tokens(name):
    """The matrix of scores has the distances of the backends."""
    model = family_model(name)
    use_positional(model, "kerple_log", own_positions="remove")
    inputs = family_inputs(model, "inner")
    expected = outputs(model, inputs)
    found = model(**inputs, use_cache=False, output_attentions=True)[0]
    if name != "t5":
        found = found[inputs["attention_mask"].bool()]
    assert (found - expected).abs().max() / expected.std() < 1e-5


@pytest.mark.parametrize(
    ("name", "causal", "window"),
    [
        ("sliding_window_causal_mask_function", True, 4),
        ("sliding_window_bidirectional_mask_function", False, 5),
    ],
)
def test_windows_of_transformers(name, causal, window):
    """transformers counts the query's own position, or the distance."""
    if OLDEST and name == "sliding_window_bidirectional_mask_function":
        pytest.skip("transformers 5.0 has no such function")
    function = getattr(masking_utils, name)(4)
    visible = attention_mask(1, 12, 12, mask_function=function, local_size=4).visible
    assert (visible.causal, visible.window, visible.dense) == (causal, window, None)


@pytest.mark.parametrize(
    ("function", "causal", "window"),
    [
        (lambda row, head, query, key: (query - key).abs() <= 2, False, 3),
        (lambda row, head, query, key: (query - key).abs() <= 7, False, None),
    ],
)
def test_windows_are_found(function, causal, window):
    """A layer may also count the keys on both sides. Any other window is a matrix."""
    visible = attention_mask(1, 12, 12, mask_function=function, local_size=4).visible
    assert (visible.causal, visible.window) == (causal, window)
    assert (visible.dense is None) == (window is not None)
