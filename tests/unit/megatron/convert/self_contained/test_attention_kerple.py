"""Attention of exported models: implementations, padding, positions, packed sequences and
probabilities.
"""

import sys

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, StaticCache

from kerple.attention import parse_mode
from megatron.convert import from_hugging_face
from megatron.inference import load_model
from tests.support.checkpoints import TRAIN_LENGTH
from tests.support.conversion import LONG, quiet, random_tokens
from tests.support.exported import export, load
from tests.support.language_models import LLAMA

IMPLEMENTATIONS = {
    "kerple_log": ("eager", "sdpa", "flex_attention"),
    "kerple_power_ap_ap": ("eager", "flex_attention"),
    "sinusoidal": ("sdpa",),
    "forgetting": ("eager", "sdpa"),
    "dape_rotary": ("eager",),
    "xpos": ("sdpa",),
    "fire": ("eager",),
    "dape_v2_kerple": ("eager",),
}
QUICK = {
    ("kerple_log", "eager"),
    ("kerple_log", "sdpa"),
    ("kerple_power_ap_ap", "eager"),
    ("xpos", "sdpa"),
}
ALL = []
for pos_emb, names in IMPLEMENTATIONS.items():
    for name in names:
        ALL.append(
            pytest.param(pos_emb, name, marks=() if (pos_emb, name) in QUICK else pytest.mark.ci)
        )
# One for each way of using positions, masks and tables.
SOME = [("kerple_log", "sdpa"), ("forgetting", "sdpa"), ("dape_rotary", "eager")]
SOME += [("kerple_power_ap_ap", "flex_attention"), ("xpos", "sdpa"), ("fire", "eager")]


@pytest.mark.parametrize(("pos_emb", "implementation"), ALL)
@torch.no_grad()
def test_every_implementation_with_padding(pos_emb, implementation):
    model, path = export(pos_emb)
    theirs = load(path, attn_implementation=implementation)
    assert theirs.config._attn_implementation == implementation
    long, short = random_tokens(1, LONG), random_tokens(1, TRAIN_LENGTH, seed=2)
    tokens = torch.cat((long, F.pad(short, (LONG - TRAIN_LENGTH, 0))))
    mask = torch.ones_like(tokens)
    mask[1, : LONG - TRAIN_LENGTH] = 0
    logits = theirs(tokens, attention_mask=mask).logits
    assert (logits[:1] - model(long)).abs().max() < 1e-4
    assert (logits[1:, -TRAIN_LENGTH:] - model(short)).abs().max() < 1e-4


# The logits are compared before the model is written, too, but only without a cache.
LLAMA_BLOCK = {**LLAMA, "head_size": 12, "sliding_window_width": 20}


@pytest.mark.parametrize(("pos_emb", "implementation"), SOME)
@torch.no_grad()
@pytest.mark.quick(2)
def test_llama_style_blocks(pos_emb, implementation):
    model, path = export(pos_emb, **LLAMA_BLOCK)
    theirs = load(path, attn_implementation=implementation)
    tokens = random_tokens(1, TRAIN_LENGTH + 8)
    logits = model(tokens)
    padded, mask = F.pad(tokens, (3, 0)), torch.tensor([[0] * 3 + [1] * (TRAIN_LENGTH + 8)])
    assert (theirs(padded, attention_mask=mask).logits[:, 3:] - logits).abs().max() < 1e-4
    cache = theirs(tokens[:, :-4]).past_key_values
    assert (
        theirs(tokens[:, -4:], past_key_values=cache).logits - logits[:, -4:]
    ).abs().max() < 1e-4


@torch.no_grad()
def test_other_blocks(tmp_path):
    """LayerNorm without biases, geglu, another width, all keys shared; imported again."""
    keys = {
        "use_bias_in_norms": False,
        "activation": "geglu",
        "intermediate_size": 60,
        "num_kv_heads": 1,
    }
    model, path = export("alibi", **keys)
    tokens = random_tokens(1, LONG)
    assert (load(path)(tokens).logits - model(tokens)).abs().max() < 1e-4
    for name, exported in (
        ("alibi", (model, path)),
        ("kerple_log", export("kerple_log", **LLAMA_BLOCK)),
    ):
        from_hugging_face(exported[1], tmp_path / name, with_tokenizer=False, report=quiet)
        assert torch.equal(load_model(tmp_path / name)[0](tokens), exported[0](tokens))


@pytest.mark.parametrize(
    ("pos_emb", "requested"),
    [
        ("fire", "sdpa"),
        ("kerple_power_ap_ap", "sdpa"),
        ("kerple_log", "flash_attention_2"),
    ],
)
def test_other_implementations_are_rejected(pos_emb, requested):
    _, path = export(pos_emb)
    message = f"{pos_emb}.*{', '.join(IMPLEMENTATIONS[pos_emb])}"
    with pytest.raises(ValueError, match=message):
        load(path, attn_implementation=requested)
    model = load(path)
    assert model.config._attn_implementation == (
        "sdpa" if "sdpa" in IMPLEMENTATIONS[pos_emb] else "eager"
    )
    with pytest.raises(ValueError, match=message):
        model.set_attn_implementation(requested)


@pytest.mark.parametrize(("pos_emb", "implementation"), SOME)
@torch.no_grad()
@pytest.mark.quick(3)
def test_padding_between_tokens(pos_emb, implementation):
    """As generate creates it after prompts that are padded on the right: distances do not count
    padding.
    """
    model, path = export(pos_emb)
    theirs = load(path, attn_implementation=implementation)
    rows = [random_tokens(1, length, seed=length) for length in (10, 7)]
    tokens = torch.cat(
        (rows[0], torch.cat((rows[1][:, :4], torch.zeros(1, 3).long(), rows[1][:, 4:]), dim=1))
    )
    mask = torch.ones(2, 10, dtype=torch.int64)
    mask[1, 4:7] = 0
    logits = theirs(tokens, attention_mask=mask).logits
    assert (logits[:1] - model(rows[0])).abs().max() < 1e-4
    assert (logits[1:, mask[1] == 1] - model(rows[1])).abs().max() < 1e-4
    # With a cache, which ends with the padding.
    cache = theirs(tokens[:, :7], attention_mask=mask[:, :7]).past_key_values
    following = theirs(tokens[:, 7:], attention_mask=mask, past_key_values=cache).logits
    assert (following - logits[:, 7:]).abs().max() < 1e-4


@pytest.mark.parametrize(
    "pos_emb", ["kerple_log", "rotary", "sinusoidal", "fire", "dape_v2_kerple", "xpos"]
)
@torch.no_grad()
def test_position_ids(pos_emb):
    _, path = export(pos_emb, **({"inference_mode": "window@999"} if pos_emb == "rotary" else {}))
    theirs = load(path, inference_mode=None)
    tokens = random_tokens(2, TRAIN_LENGTH)
    logits = theirs(tokens).logits
    positions = torch.arange(TRAIN_LENGTH)[None]
    assert torch.equal(theirs(tokens, position_ids=positions).logits, logits)
    # Only some methods depend on more than differences of positions.
    difference = (theirs(tokens, position_ids=positions + 600).logits - logits).abs().max()
    assert difference > 1e-3 if pos_emb in ("sinusoidal", "fire") else difference < 1e-3
    # Two texts in a row, without padding and with padding at the end.
    packed = torch.cat((torch.arange(20), torch.arange(TRAIN_LENGTH - 20)))[None]
    mask = torch.ones_like(tokens)
    mask[1, -3:] = 0
    for attention_mask in (None, mask):
        packed_logits = theirs(tokens, position_ids=packed, attention_mask=attention_mask).logits
        for part in (slice(0, 20), slice(20, TRAIN_LENGTH - 3)):
            assert (packed_logits[:, part] - theirs(tokens[:, part]).logits).abs().max() < 1e-4
    # Padding between the texts, with any positions; a text of one token.
    parts = (slice(0, 9), slice(12, 13), slice(13, TRAIN_LENGTH))
    mask = torch.ones_like(tokens)
    mask[:, 9:12] = 0
    for start in (0, 9):
        counted = [torch.arange(length) for length in (9, 3, 1, TRAIN_LENGTH - 13)]
        counted[1] = counted[1] + start
        options = {"attention_mask": mask, "position_ids": torch.cat(counted)[None]}
        found = theirs(tokens, **options, use_cache=False).logits
        for part in parts:
            assert (found[:, part] - theirs(tokens[:, part]).logits).abs().max() < 1e-4
    with pytest.raises(ValueError, match="cannot be cached"):
        theirs(tokens, position_ids=packed, use_cache=True)
    with pytest.raises(ValueError, match="must be consecutive"):
        theirs(tokens, position_ids=packed, past_key_values=theirs(tokens[:, :1]).past_key_values)


@pytest.mark.parametrize(
    ("pos_emb", "implementation"), [("kerple_log", "sdpa"), ("kerple_power_ap_ap", "eager")]
)
@torch.no_grad()
def test_output_attentions(pos_emb, implementation):
    """The first layer's probabilities, from the formula."""
    _, path = export(pos_emb)
    theirs = load(path, attn_implementation=implementation)
    tokens = random_tokens(2, TRAIN_LENGTH)
    output = theirs(tokens, output_attentions=True, output_hidden_states=True)
    layer, method = theirs.gpt_neox.layers[0], theirs.gpt_neox.positional
    states = layer.attention.query_key_value(layer.input_layernorm(output.hidden_states[0]))
    query, key, _ = states.view(2, TRAIN_LENGTH, 4, 3, 8).permute(3, 0, 2, 1, 4)
    distance = (
        (torch.arange(TRAIN_LENGTH)[:, None] - torch.arange(TRAIN_LENGTH)).clamp(min=0).float()
    )
    parameters = {name: parameter.clamp(min=0.01) for name, parameter in method.named_parameters()}
    p, a = parameters["bias_p"], parameters["bias_a"]
    scores = query @ key.transpose(2, 3) / 8**0.5
    if pos_emb == "kerple_log":
        scores = scores - p * torch.log(1 + a * distance)
    else:
        weight = torch.exp(-parameters["wei_a"] * distance ** parameters["wei_p"].clamp(max=2))
        scores = scores * weight - a * distance ** p.clamp(max=2)
    causal = torch.ones(TRAIN_LENGTH, TRAIN_LENGTH).tril().bool()
    expected = scores.masked_fill(~causal, float("-inf")).softmax(dim=-1)
    assert (output.attentions[0] - expected).abs().max() < 1e-5
    assert [part.shape for part in output.attentions] == [(2, 4, TRAIN_LENGTH, TRAIN_LENGTH)] * 2
    assert (output.attentions[1].sum(dim=-1) - 1).abs().max() < 1e-5
    assert len(output.hidden_states) == 3
    assert (theirs.embed_out(output.hidden_states[-1]) - theirs(tokens).logits).abs().max() < 1e-5


@pytest.mark.parametrize("pos_emb", ["kerple_log", "dape_rotary"])
@torch.no_grad()
def test_masks_of_another_shape_or_with_other_values_are_rejected(pos_emb):
    _, path = export(pos_emb)
    theirs, tokens = load(path), random_tokens(3, 8)
    padded = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1])
    for mask in (
        padded[None],
        torch.ones(1, 8),
        padded.expand(2, -1),
        torch.ones(3, 1, 8, 8),
        torch.ones(3, 11),
    ):
        with pytest.raises(ValueError, match=r"attention_mask must be \[3, 8\]"):
            theirs(tokens, attention_mask=mask)
    with pytest.raises(ValueError, match=r"attention_mask must be \[3, 8\]"):
        theirs.generate(tokens, attention_mask=padded[None], max_new_tokens=2)
    classifier = load(path, AutoModelForSequenceClassification, pad_token_id=0)
    with pytest.raises(ValueError, match=r"attention_mask must be \[3, 8\]"):
        classifier(tokens, attention_mask=padded[None])
    # Numbers of documents, and an additive mask.
    for row in ([0, 1, 1, 1, 2, 2, 2, 3], [float("-inf")] * 2 + [0.0] * 6):
        with pytest.raises(ValueError, match="attention_mask must contain only 1"):
            theirs(tokens, attention_mask=torch.tensor(row).expand(3, -1))


def test_calls_are_validated():
    """As in `attend`: tensors that do not fit would be broadcast."""
    model, states = load(export("alibi")[1]), torch.randn(2, 4, 6, 8)
    layers = sys.modules[type(model.gpt_neox.layers[0]).__module__]
    call = layers.AttentionCall(query=states, key=states[:1], value=states, scale=1.0)
    with pytest.raises(ValueError, match=r"key \[1, 4, 6, 8\]"):
        layers.attend(call, "eager", output_attentions=False)


def test_calls_that_an_implementation_does_not_support():
    theirs = load(export("kerple_log")[1], attn_implementation="flex_attention")
    theirs.config.attention_dropout = 0.1
    message = "flex_attention does not support attention dropout; choose from eager, sdpa$"
    with pytest.raises(ValueError, match=message):
        theirs.train()(random_tokens(1, 8))


MODES = [
    ("kerple_log", "sinks@3+9+reindexed+logn@16", "sdpa"),
    ("rotary", "sinks@3+9+reindexed+clip@6", "eager"),
    ("forgetting", "sinks@3+9", "sdpa"),
    ("kerple_log", "blockwise+log@8", "eager"),
    ("rotary", "window@9+dynamic-ntk+logn", "sdpa"),
    ("alibi", "sinks@3+9+linear", "sdpa"),
    ("dape_kerple", "window@9+yarn-temperature@4", "eager"),
]
# The tokens of calls with a cache. The mask of the second row begins with 13 paddings.
CALLS = [(0, 14), (14, 16), (16, 40), *((token, token + 1) for token in range(40, 50))]


@pytest.mark.parametrize(("pos_emb", "name", "implementation"), MODES)
@torch.no_grad()
@pytest.mark.quick(3)
def test_inference_modes(pos_emb, name, implementation):
    """The logits of this project's model in the same mode, with a cache and without, also in a
    batch with padding.
    """
    model, path = export(
        pos_emb, **({"inference_mode": "sinks@2+8"} if pos_emb == "rotary" else {})
    )
    theirs = load(path, inference_mode=name, attn_implementation=implementation)
    mode = parse_mode(name, TRAIN_LENGTH).attention
    rows = random_tokens(1, 50), random_tokens(1, 37, seed=2)
    tokens = torch.cat((rows[0], F.pad(rows[1], (13, 0))))
    mask = torch.ones_like(tokens)
    mask[1, :13] = 0

    def difference(logits, row, length):
        """From the logits in a text of this length, on which some modes depend."""
        expected = model(rows[row], mode=mode.at_length(length))
        return (logits[row : row + 1, -expected.shape[1] :] - expected).abs().max()

    logits = theirs(tokens, attention_mask=mask).logits
    assert difference(logits, 0, 50) < 1e-4
    assert difference(logits, 1, 37) < 1e-4
    assert (logits[:1] - model(rows[0])).abs().max() > 1e-2
    cache = theirs.new_cache(max_length=50)
    parts = [
        theirs(tokens[:, first:end], past_key_values=cache, attention_mask=mask[:, :end]).logits
        for first, end in CALLS
    ]
    logits = torch.cat(parts, dim=1)
    assert difference(logits, 0, 50) < 1e-4
    assert difference(logits, 1, 50) < 1e-4
    # Without padding, rows are computed together.
    cache = theirs.new_cache(max_length=50)
    parts = [theirs(tokens[:, first:end], past_key_values=cache).logits for first, end in CALLS]
    assert difference(torch.cat(parts, dim=1), 0, 50) < 1e-4


@torch.no_grad()
def test_padding_and_packed_sequences_in_an_inference_mode():
    model, path = export("kerple_log")
    theirs, mode = load(path, inference_mode="sinks@3+9"), parse_mode("sinks@3+9").attention
    tokens = random_tokens(1, 40)
    mask = torch.ones_like(tokens)
    mask[:, 20:25] = mask[:, 36:] = 0
    visible = tokens[mask.bool()][None]
    logits = theirs(tokens, attention_mask=mask).logits[mask.bool()]
    assert (logits - model(visible, mode=mode)).abs().max() < 1e-4
    with pytest.raises(ValueError, match="padding cannot be cached"):
        theirs(tokens, attention_mask=mask, use_cache=True)
    packed = theirs(
        tokens, position_ids=torch.cat((torch.arange(15), torch.arange(25)))[None]
    ).logits
    assert (packed[:, 15:] - model(tokens[:, 15:], mode=mode)).abs().max() < 1e-4
    with pytest.raises(ValueError, match="must count the tokens of each text from 0"):
        theirs(tokens, position_ids=torch.arange(40)[None] + 5)


@pytest.mark.parametrize(
    ("pos_emb", "options", "message"),
    [
        ("kerple_log", {"inference_mode": "sliding"}, "inference.*'sliding'"),
        ("none", {"inference_mode": "full+clip@4"}, r"full.clip@4.*pos_emb none"),
        (
            "kerple_log",
            {"inference_mode": "sinks@3+9", "attn_implementation": "flex_attention"},
            "from eager, sdpa$",
        ),
        (
            "fire",
            {"inference_mode": "window@9", "attn_implementation": "sdpa"},
            "fire.*window@9.*eager",
        ),
    ],
)
def test_modes_that_are_rejected_when_a_model_is_loaded(pos_emb, options, message):
    with pytest.raises(ValueError, match=message):
        load(export(pos_emb)[1], **options)


def test_what_is_rejected_in_an_inference_mode():
    _, path = export("alibi")
    theirs, tokens = load(path, inference_mode="full+linear"), random_tokens(1, 8)
    for options, message in (
        ({"output_attentions": True}, "output_attentions is not supported"),
        (
            {"past_key_values": StaticCache(config=theirs.config, max_cache_len=16)},
            "static caches are not supported",
        ),
        (
            {"use_cache": True},
            r"depends on the length of the text: .*past_key_values=model.new_cache\(max_length=N\)",
        ),
        ({"past_key_values": theirs.new_cache(max_length=7)}, "with N of at least 8 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            theirs(tokens, **options)
    assert theirs(tokens).past_key_values is None
