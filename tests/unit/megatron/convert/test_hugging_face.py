"""Models written to Hugging Face folders and read from them give the same logits, also with a cache
and padding.
"""

import json
import math
import os
import shutil
import stat
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPTNeoXForCausalLM,
    PreTrainedTokenizerFast,
)

from kerple.attention import AttentionMode, LogLength
from kerple.positional import primary_names
from kerple.positional.distance_maps import Clip
from megatron.checkpoint.layers import open_layers
from megatron.checkpoint.storage import CheckpointError
from megatron.config import UserError
from megatron.convert import from_hugging_face, hugging_face, to_hugging_face
from megatron.convert.output import with_float32_angles
from megatron.convert.weights import saved_dtype
from megatron.inference import load_model
from megatron.inference.decoder import as_decoder
from megatron.tokenizer.hugging_face import train_bpe
from megatron.tokenizer.tokenizer import TokenizerFiles
from tests.support.checkpoints import TRAIN_LENGTH, VOCABULARY, Exploit
from tests.support.conversion import LONG, greedy, make_model, quiet, random_tokens
from tests.support.errors import assert_rejected
from tests.support.exported import load
from tests.support.families import family_model
from tests.support.release import checkpoints
from tests.support.texts import KINDS

CHARACTERS = TokenizerFiles("CharLevelTokenizer")


# Methods of each kind, whose models are also tested with left padding.
PADDED = (
    "kerple_log",
    "kerple_power_ap_ap",
    "sinusoidal",
    "learned",
    "rpe",
    "xpos",
    "fire",
    "dape_kerple",
    "dape_v2",
)


QUICK = ("kerple_log", "rotary", "learned", "forgetting")


def longest(pos_emb: str) -> int:
    return TRAIN_LENGTH if pos_emb == "learned" else LONG


@pytest.mark.parametrize(
    "pos_emb",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.ci) for name in primary_names()],
)
@torch.no_grad()
def test_every_method(pos_emb, tmp_path):
    model, config = make_model(pos_emb)
    to_hugging_face(model, config, tmp_path / "hf", tokenizer=CHARACTERS, report=quiet)
    theirs = load(tmp_path / "hf")
    assert isinstance(theirs, GPTNeoXForCausalLM) == (pos_emb == "rotary")

    for length in (TRAIN_LENGTH, longest(pos_emb)):
        tokens = random_tokens(2, length)
        assert (theirs(tokens).logits - model(tokens)).abs().max() < 1e-4

    # With a cache, across the end of the training length.
    prompt = random_tokens(1, longest(pos_emb) - 12)
    expected = greedy(model, prompt, 12)
    for use_cache in (True, False):
        generated = theirs.generate(
            prompt, max_new_tokens=12, do_sample=False, use_cache=use_cache, eos_token_id=None
        )
        assert generated.tolist() == expected.tolist()

    if pos_emb in PADDED:
        assert_left_padding_changes_nothing(model, theirs)

    # Saved by transformers, and loaded again.
    theirs.save_pretrained(tmp_path / "again")
    tokens = random_tokens(1, TRAIN_LENGTH)
    assert torch.equal(load(tmp_path / "again")(tokens).logits, theirs(tokens).logits)


def assert_left_padding_changes_nothing(model, theirs) -> None:
    rows = [random_tokens(1, length, seed=length) for length in (9, 17, 4)]
    width = max(row.shape[1] for row in rows)
    tokens = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
    mask = torch.tensor([[0] * (width - row.shape[1]) + [1] * row.shape[1] for row in rows])
    logits = theirs(tokens, attention_mask=mask).logits
    generated = theirs.generate(
        tokens, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None
    )
    for index, row in enumerate(rows):
        assert (logits[index, -row.shape[1] :] - model(row)[0]).abs().max() < 1e-4
        assert generated[index, -row.shape[1] - 8 :].tolist() == greedy(model, row, 8)[0].tolist()


@torch.no_grad()
def test_layers_with_different_methods(tmp_path):
    """Grouped queries, and padding, which each method handles in its own way."""
    methods = ["forgetting", {"dape_kerple": {"mlp_width": 8}}]
    model, config = make_model("per_layer", pos_emb_options={"methods": methods}, num_kv_heads=2)
    to_hugging_face(model, config, tmp_path / "hf", report=quiet)
    theirs = load(tmp_path / "hf")
    assert theirs.config._attn_implementation == "eager"
    prompt = random_tokens(1, LONG - 8)
    generated = theirs.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert generated.tolist() == greedy(model, prompt, 8).tolist()
    tokens = torch.nn.functional.pad(prompt, (5, 0))
    logits = theirs(tokens, attention_mask=(tokens > 0).long()).logits
    assert (logits[:, 5:] - model(prompt)).abs().max() < 1e-4


PARALLEL, TIED = (
    {"gpt_j_residual": True, "bias_gelu_fusion": True},
    {"no_weight_tying": False, "layernorm_epsilon": 1e-3},
)
RMSNORM = {"norm": "rmsnorm", "activation": "silu"}


@pytest.mark.parametrize(
    ("pos_emb", "keys", "stock"),
    [
        *(("rotary", PARALLEL, True), ("rotary", TIED, True), ("rotary", RMSNORM, False)),
        *(("rotary", {"activation": "swiglu"}, False), ("kerple_log", TIED, False)),
    ],
)
@torch.no_grad()
def test_every_shape_of_model(pos_emb, keys, stock, tmp_path):
    model, config = make_model(pos_emb, **keys)
    to_hugging_face(model, config, tmp_path / "hf", report=quiet)
    theirs = load(tmp_path / "hf")
    assert isinstance(theirs, GPTNeoXForCausalLM) == stock
    tokens = random_tokens(1, LONG)
    assert (theirs(tokens).logits - model(tokens)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("options", "stock"),
    [
        ({"scaling": "yarn", "factor": 4.0, "beta_fast": 16}, True),
        pytest.param({"scaling": "ntk", "factor": 4.0}, False, marks=pytest.mark.ci),
    ],
)
@torch.no_grad()
def test_interpolated_rotary(options, stock, tmp_path):
    model, config = make_model("rotary", pos_emb_options=options)
    to_hugging_face(model, config, tmp_path / "hf", report=quiet)
    theirs = load(tmp_path / "hf")
    assert isinstance(theirs, GPTNeoXForCausalLM) == stock
    tokens = random_tokens(1, LONG)
    assert (theirs(tokens).logits - model(tokens)).abs().max() < 1e-4
    assert (make_model("rotary")[0](tokens) - model(tokens)).abs().max() > 1e-2
    from_hugging_face(tmp_path / "hf", tmp_path / "back", with_tokenizer=False, report=quiet)
    back, config = load_model(tmp_path / "back")
    assert torch.equal(back(tokens), model(tokens))
    assert config.model.pos_emb_options["scaling"] == options["scaling"]


DYNAMIC = {"scaling": "dynamic", "factor": 2}


@pytest.mark.parametrize(
    ("pos_emb", "keys", "message"),
    [
        ("rotary", {"pos_emb_options": {"random_range": 256}}, "random_range"),
        (
            "per_layer",
            {"pos_emb_options": {"methods": [{"rotary": {"random_range": 256}}, "none"]}},
            "random_range",
        ),
        ("rotary", {"sliding_window_width": [9, None]}, "sliding_window_width"),
        ("rotary", {"activation": "swiglu", "pos_emb_options": DYNAMIC}, "angles"),
        ("per_layer", {"pos_emb_options": {"methods": ["none", {"rotary": DYNAMIC}]}}, "angles"),
    ],
)
def test_models_that_cannot_be_exported(pos_emb, keys, message, tmp_path):
    model, config = make_model(pos_emb, **keys)
    with pytest.raises(CheckpointError, match=message):
        to_hugging_face(model, config, tmp_path / "hf", report=quiet)


@torch.no_grad()
def test_the_released_rotary_model_far_beyond_its_training_length(tmp_path):
    """At 2,048, where float32 angles are inaccurate, logits agree to 1e-4 if both
    models use them.
    """
    model, config = load_model(checkpoints("rotary"))
    reports = []
    to_hugging_face(model, config, tmp_path / "hf", report=reports.append)
    assert "computes angles in float32" in reports[-1]
    theirs = load(tmp_path / "hf")
    tokens = torch.randint(0, 128, (1, 2048), generator=torch.Generator().manual_seed(0))
    expected = theirs(tokens).logits
    assert (with_float32_angles(model)(tokens) - expected).abs().max() < 1e-4
    assert 1e-4 < (model(tokens) - expected).abs().max() < 5e-3


@torch.no_grad()
def test_rounded_distances_are_not_exported(tmp_path):
    model, config = make_model("kerple_log", release_bf16_distances=True)
    messages = []
    to_hugging_face(model, config, tmp_path / "out", report=messages.append)
    assert "release_bf16_distances is not exported" in messages[0]
    exact, _ = make_model("kerple_log")
    tokens = random_tokens(1, LONG)
    assert (load(tmp_path / "out")(tokens).logits - exact(tokens)).abs().max() < 1e-4


def test_labels_give_the_shifted_loss_and_gradients(tmp_path):
    model, config = make_model("kerple_power_ap_ap")
    to_hugging_face(model, config, tmp_path / "hf", report=quiet)
    theirs = load(tmp_path / "hf").train()
    tokens = random_tokens(2, TRAIN_LENGTH)
    output = theirs(tokens, labels=tokens)
    expected = model.loss(tokens[:, :-1], tokens[:, 1:])
    assert output.past_key_values is None
    assert output.loss.item() == pytest.approx(expected.item(), abs=1e-5)
    output.loss.backward()
    expected.backward()
    method = next(iter(model.positional_methods().values()))
    for name, parameter in method.named_parameters():
        other = theirs.get_parameter(f"gpt_neox.positional.{name}")
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_wrong_conversion_is_not_written(tmp_path, monkeypatch):
    def wrong(*arguments):
        model, tensors = arguments[0], right(*arguments)
        name = "gpt_neox.layers.1.attention.query_key_value.weight"
        heads = model.settings.config.num_attention_heads
        # The mistake of GPT-NeoX's early converters: all queries, then all keys, then all values.
        tensors[name] = (
            tensors[name]
            .view(heads, 3, -1, 32)
            .transpose(0, 1)
            .reshape(tensors[name].shape)
            .contiguous()
        )
        return tensors

    right = hugging_face.hugging_face_tensors
    monkeypatch.setattr(hugging_face, "hugging_face_tensors", wrong)
    for pos_emb in ("rotary", "alibi"):
        model, config = make_model(pos_emb)
        with pytest.raises(CheckpointError, match="logits differ by"):
            to_hugging_face(model, config, tmp_path / "hf" / pos_emb, report=quiet)
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(("value", "dtype"), [(math.nan, torch.float32), (1e5, torch.float16)])
def test_weights_that_would_not_be_finite_are_not_written(value, dtype, tmp_path, monkeypatch):
    """Also those of tokens that are not in the compared texts."""
    monkeypatch.setattr(hugging_face, "check_same_logits", lambda *_: None)
    model, config = make_model("alibi")
    model.embedding.word_embeddings.weight.data[7] = value
    with pytest.raises(CheckpointError, match=r"embed_in\.weight"):
        to_hugging_face(model, config, tmp_path / "hf", dtype=dtype, report=quiet)
    if dtype == torch.float16:
        to_hugging_face(model, config, tmp_path / "hf", report=quiet)
        with pytest.raises(CheckpointError, match=r"word_embeddings\.weight"):
            from_hugging_face(
                tmp_path / "hf", tmp_path / "own", with_tokenizer=False, dtype=dtype, report=quiet
            )


def test_special_tokens_and_a_tokenizer_that_needs_no_code(tmp_path, monkeypatch):
    """transformers 5's AutoTokenizer asks whether to run the model's code: it always loads the
    model's config.
    """

    def ask(text):
        pytest.fail(text)

    monkeypatch.setattr("builtins.input", ask)
    model, config = make_model("alibi")
    to_hugging_face(model, config, tmp_path / "hf", tokenizer=CHARACTERS, report=quiet)
    card = (tmp_path / "hf" / "README.md").read_text()
    assert 'tokenizer = PreTrainedTokenizerFast.from_pretrained("THIS_FOLDER")' in card
    assert 'prompt = tokenizer(["Once upon a time"], return_tensors="pt")' in card
    with_code = AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    for tokenizer in (PreTrainedTokenizerFast.from_pretrained(tmp_path / "hf"), with_code):
        assert tokenizer("abc").input_ids == [97, 98, 99]
        assert (tokenizer.eos_token_id, tokenizer.padding_side) == (0, "left")
    written = AutoConfig.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    assert (written.vocab_size, written.eos_token_id, written.pad_token_id) == (VOCABULARY, 0, 0)
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == 0


def test_files_have_the_permissions_of_the_umask(tmp_path, monkeypatch):
    """And no bytecode is written, although the model's code is imported for the comparison."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    model, config = make_model("alibi")
    umask = 0o027
    before = os.umask(umask)
    try:
        to_hugging_face(model, config, tmp_path / "hf", report=quiet)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "hf").iterdir()} == {
        0o666 & ~umask
    }


@pytest.mark.parametrize(
    "keys",
    [
        {},  # Pythia: parallel residuals, a quarter of the dimensions rotated
        {"use_parallel_residual": False, "hidden_act": "gelu_new"},
        {"tie_word_embeddings": True, "layer_norm_eps": 1e-3},
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 300.0,
                "partial_rotary_factor": 1.0,
            }
        },
    ],
    ids=["pythia", "sequential", "tied", "rotary base"],
)
@torch.no_grad()
def test_gpt_neox_models(keys, tmp_path):
    theirs = family_model(tmp_path / "hf", "pythia", **keys)
    from_hugging_face(tmp_path / "hf", tmp_path / "ours", with_tokenizer=False, report=quiet)
    ours, config = load_model(tmp_path / "ours")
    assert config.model.gpt_j_residual == theirs.config.use_parallel_residual
    tokens = random_tokens(2, LONG)
    assert (ours(tokens) - theirs(tokens).logits).abs().max() < 1e-4


@torch.no_grad()
def test_files_of_transformers_4(tmp_path):
    """Top-level rotary keys in config.json, masks and frequencies among the weights, several files
    with an index.
    """
    theirs = family_model(tmp_path / "hf", "pythia")
    path = tmp_path / "hf" / "config.json"
    keys = json.loads(path.read_text())
    del keys["rope_parameters"], keys["attention_bias"]
    path.write_text(json.dumps({**keys, "rotary_pct": 0.25, "rotary_emb_base": 10000}))
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    for block in range(2):
        tensors[f"gpt_neox.layers.{block}.attention.bias"] = torch.ones(
            1, 1, 32, 32, dtype=torch.bool
        )
        tensors[f"gpt_neox.layers.{block}.attention.masked_bias"] = torch.tensor(-1e9)
        tensors[f"gpt_neox.layers.{block}.attention.rotary_emb.inv_freq"] = torch.ones(1)
    names = sorted(tensors)
    parts = {
        "model-00001-of-00002.safetensors": names[:10],
        "model-00002-of-00002.safetensors": names[10:],
    }
    for part, part_names in parts.items():
        save_file(
            {name: tensors[name] for name in part_names},
            tmp_path / "hf" / part,
            metadata={"format": "pt"},
        )
    (tmp_path / "hf" / "model.safetensors").unlink()
    index = {
        "metadata": {},
        "weight_map": {name: part for part, part_names in parts.items() for name in part_names},
    }
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))

    from_hugging_face(tmp_path / "hf", tmp_path / "ours", with_tokenizer=False, report=quiet)
    tokens = random_tokens(1, LONG)
    assert (load_model(tmp_path / "ours")[0](tokens) - theirs(tokens).logits).abs().max() < 1e-4


@torch.no_grad()
def test_other_keys_of_gpt_neox(tmp_path):
    """Those that change what transformers computes are refused, the others are not read."""
    theirs = family_model(tmp_path / "hf", "pythia")
    path = tmp_path / "hf" / "config.json"
    values = json.loads(path.read_text())
    for other, message in (
        ({"is_causal": False}, "logits differ"),
        ({"per_layer_config": {"1": {"layer_norm_eps": 0.5}}}, "logits differ|cannot build"),
        ({"id2label": {"one": "a"}}, "transformers cannot build"),
    ):
        path.write_text(json.dumps({**values, **other}))
        with pytest.raises(CheckpointError, match=message):
            from_hugging_face(
                tmp_path / "hf", tmp_path / "ours", with_tokenizer=False, report=quiet
            )
        assert not (tmp_path / "ours").exists()

    other = {"attn_implementation": "nobody/no-kernels", "auto_map": {"AutoConfig": "trap.Config"}}
    other |= {"return_dict": False, "output_attentions": True, "some_metadata": [1]}
    (tmp_path / "hf" / "trap.py").write_text("raise SystemExit('this code must not run')")
    path.write_text(json.dumps({**values, **other}))
    from_hugging_face(tmp_path / "hf", tmp_path / "ours", with_tokenizer=False, report=quiet)
    tokens = random_tokens(1, LONG)
    assert (load_model(tmp_path / "ours")[0](tokens) - theirs(tokens).logits).abs().max() < 1e-4


@torch.no_grad()
def test_weights_of_several_dtypes_are_not_rounded(tmp_path):
    """The first tensor is in bfloat16, the others in float32."""
    theirs = family_model(tmp_path / "hf", "pythia")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "model.safetensors").unlink()
    first = {name: tensors.pop(name).bfloat16() for name in list(tensors) if "embed_in" in name}
    torch.save({**first, **tensors}, tmp_path / "hf" / "pytorch_model.bin")
    from_hugging_face(tmp_path / "hf", tmp_path / "ours", with_tokenizer=False, report=quiet)
    step = tmp_path / "ours" / "global_step0"
    layers = open_layers(step)
    assert {
        tensor.dtype for files in layers.values() for file in files for tensor in file.values()
    } == {torch.float32}
    expected = theirs.gpt_neox.layers[0].mlp.dense_h_to_4h.weight
    assert torch.equal(layers[2][0]["mlp.dense_h_to_4h.weight"], expected)
    embedding = step / "layer_00-model_00-model_states.pt"
    assert saved_dtype(step) == torch.float32
    for path in step.glob("layer_*"):
        state = torch.load(path, weights_only=True)
        half = {name: tensor.half() for name, tensor in state.items()}
        torch.save({**half, "attention.rotary_emb.inv_freq": torch.ones(1)}, path)
    assert saved_dtype(step) == torch.float16  # a computed buffer does not count
    torch.save({"word_embeddings.weight": torch.ones(8, 32)}, embedding)
    assert saved_dtype(step) == torch.float32


@torch.no_grad()
def test_pytorch_bin_files_are_read_as_tensors_or_rejected(tmp_path):
    theirs = family_model(tmp_path / "hf", "pythia")
    weights, pickled = tmp_path / "hf" / "model.safetensors", tmp_path / "hf" / "pytorch_model.bin"
    torch.save(load_file(weights), pickled)
    weights.unlink()
    from_hugging_face(tmp_path / "hf", tmp_path / "ours", with_tokenizer=False, report=quiet)
    tokens = random_tokens(1, LONG)
    assert (load_model(tmp_path / "ours")[0](tokens) - theirs(tokens).logits).abs().max() < 1e-4

    torch.save({"gpt_neox.embed_in.weight": Exploit(tmp_path / "owned")}, pickled)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: rejected"):
        from_hugging_face(tmp_path / "hf", tmp_path / "theirs", with_tokenizer=False, report=quiet)
    assert not (tmp_path / "owned").exists()
    assert not (tmp_path / "theirs").exists()


@torch.no_grad()
@pytest.mark.ci
def test_an_inference_mode_is_written(tmp_path):
    """A rotary model then has its own code, and its logits are compared in the mode."""
    model, config = make_model("rotary", seq_length=24)
    lines: list[str] = []
    to_hugging_face(
        model, config, tmp_path / "hf", inference_mode="full+logn+clip@8", report=lines.append
    )
    assert "inference mode full+clip@8+logn: logits compared at length 24 and 96" in lines[1]
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (values["inference_mode"], values["training_length"]) == ("full+clip@8+logn", 24)
    assert "The default is `full+clip@8+logn`" in (tmp_path / "hf" / "README.md").read_text()
    tokens, mode = (
        random_tokens(1, LONG),
        AttentionMode(distance_map=Clip(8), scaling=LogLength(24)),
    )
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", trust_remote_code=True, dtype=torch.float32
    )
    assert (theirs(tokens).logits - model(tokens, mode=mode)).abs().max() < 1e-4
    assert "full+clip@8+logn" in as_decoder(theirs).unsupported_reason(AttentionMode())
    for name, message in (("full+log@8", "full.log@8.*pos_emb rotary"), ("win", "win")):
        with pytest.raises(CheckpointError, match=message):
            to_hugging_face(model, config, tmp_path / "other", inference_mode=name, report=quiet)
    from_hugging_face(tmp_path / "hf", tmp_path / "ours", with_tokenizer=False, report=lines.append)
    assert (
        "a checkpoint has no inference_mode; name full+clip@8+logn in kerple evaluate --modes"
        in "".join(lines[2:])
    )
    assert torch.equal(load_model(tmp_path / "ours")[0](tokens), model(tokens))


@pytest.mark.parametrize(
    ("pos_emb", "dtype"),
    [("rotary", torch.bfloat16), ("kerple_log", None), ("rotary", None), ("learned", None)],
)
@torch.no_grad()
@pytest.mark.quick(2)
def test_exported_models_are_imported_again(pos_emb, dtype, tmp_path):
    model, config = make_model(pos_emb, gpt_j_residual=True)
    to_hugging_face(model, config, tmp_path / "hf", dtype=torch.bfloat16, report=quiet)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    for source in (tmp_path / "hf").glob("*.py"):
        source.write_text("raise SystemExit('this code must not run')")
    from_hugging_face(
        tmp_path / "hf", tmp_path / "ours", dtype=dtype, with_tokenizer=False, report=quiet
    )
    step = tmp_path / "ours" / "global_step0"
    state = torch.load(step / "layer_02-model_00-model_states.pt", weights_only=True)
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    tokens = random_tokens(1, 32)
    assert torch.equal(load_model(tmp_path / "ours")[0](tokens), model.bfloat16().float()(tokens))


def test_misspelled_keys_of_an_export(tmp_path):
    """Another key is not read as its default: the model would be another one."""
    model, config = make_model("fire")
    to_hugging_face(model, config, tmp_path / "hf", report=quiet)
    path = tmp_path / "hf" / "config.json"
    content = json.loads(path.read_text())
    attention_bias, options = content["attention_bias"], content["positional_options"]
    renamed = {name: value for name, value in content.items() if name != "attention_bias"}
    for values, message in (
        ({**renamed, "attention_biass": attention_bias}, "attention_biass.*attention_bias"),
        ({**content, "window": 8}, "window"),
        ({**content, "positional_options": {**options, "treshold": 9}}, "treshold"),
    ):
        path.write_text(json.dumps(values))
        with pytest.raises((CheckpointError, UserError), match=message):
            from_hugging_face(
                tmp_path / "hf", tmp_path / "ours", with_tokenizer=False, report=quiet
            )
        assert not (tmp_path / "ours").exists()

    # What transformers writes itself.
    added = {"torch_dtype": "float32", "_name_or_path": "x", "id2label": {"0": "a"}, "top_k": 9}
    added |= {"quantization_config": None, "eos_token_id": 3, "transformers_version": "4.57.1"}
    path.write_text(json.dumps({**content, **added}))
    from_hugging_face(tmp_path / "hf", tmp_path / "ours", with_tokenizer=False, report=quiet)


def test_the_tokenizer_is_imported(tmp_path):
    family_model(tmp_path / "hf", "pythia")
    tokenizer = train_bpe(KINDS.values(), 400)
    tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    from_hugging_face(tmp_path / "hf", tmp_path / "ours", report=quiet)
    shutil.rmtree(tmp_path / "hf")
    _, config = load_model(tmp_path / "ours")
    ours = TokenizerFiles.of(config).build()
    assert ours.tokenize(KINDS["python"]) == tokenizer.encode(KINDS["python"]).ids


def test_an_edited_tokenizer_of_an_export_is_refused(tmp_path):
    train_bpe(KINDS.values(), 400).save(str(tmp_path / "tokenizer.json"))
    tokenizer = TokenizerFiles("HFTokenizer", tmp_path / "tokenizer.json")
    model, config = make_model("kerple_log")
    to_hugging_face(model, config, tmp_path / "hf", tokenizer=tokenizer, report=quiet)
    from_hugging_face(tmp_path / "hf", tmp_path / "ours", report=quiet)

    path = tmp_path / "hf" / "tokenizer.json"
    document = json.loads(path.read_text())
    document["model"]["merges"].pop(20)
    path.write_text(json.dumps(document))
    expected = r"tokenizer\.json.*tokenizer_ids_sha256"
    assert_rejected(expected, from_hugging_face, tmp_path / "hf", tmp_path / "edited", report=quiet)
    assert not (tmp_path / "edited").exists()


def test_missing_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*config\.json"):
        from_hugging_face(tmp_path / "nothing", tmp_path / "ours", report=quiet)
    family_model(tmp_path / "hf", "pythia")
    assert_rejected(
        "neither tokenizer", from_hugging_face, tmp_path / "hf", tmp_path / "ours", report=quiet
    )
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read"):
        from_hugging_face(tmp_path / "hf", tmp_path / "ours", with_tokenizer=False, report=quiet)
    (tmp_path / "hf" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="there are no weights to convert"):
        from_hugging_face(tmp_path / "hf", tmp_path / "ours", with_tokenizer=False, report=quiet)
    assert not (tmp_path / "ours").exists()
