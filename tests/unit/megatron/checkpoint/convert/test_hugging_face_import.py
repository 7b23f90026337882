"""GPT-NeoX and Pythia folders come in, with the logits of transformers' own model."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from megatron.checkpoint.convert import from_hugging_face, to_hugging_face
from megatron.checkpoint.convert.tokenizer_files import TokenizerFiles
from megatron.checkpoint.storage import CheckpointError
from megatron.config import UserError
from megatron.inference import load_model
from megatron.tokenizer.hugging_face import train_bpe
from tests.support.conversion import LONG, make_model, quiet, random_tokens
from tests.support.texts import KINDS

SIZES = {
    "vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 32,
}


def stock_model(folder, **keys: object) -> GPTNeoXForCausalLM:
    """A GPTNeoXForCausalLM of random weights, saved by transformers in `folder`."""
    torch.manual_seed(3)
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**{**SIZES, "initializer_range": 0.2, **keys})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.05)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "keys",
    [
        {},  # Pythia: parallel residuals, a quarter of the dimensions rotated
        {"use_parallel_residual": False, "hidden_act": "gelu_new"},
        {"tie_word_embeddings": True, "layer_norm_eps": 1e-3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0}},
    ],
    ids=["pythia", "sequential", "tied", "rotary base"],
)
@torch.no_grad()
def test_gpt_neox_models(keys, tmp_path):
    theirs = stock_model(tmp_path / "hf", **keys)
    from_hugging_face(tmp_path / "hf", tmp_path / "ours", with_tokenizer=False, report=quiet)
    ours, config = load_model(tmp_path / "ours")
    assert config.model.gpt_j_residual == theirs.config.use_parallel_residual
    tokens = random_tokens(2, LONG)
    assert (ours(tokens) - theirs(tokens).logits).abs().max() < 1e-4


@torch.no_grad()
def test_files_of_transformers_4(tmp_path):
    """Rotary keys at the top of config.json, masks and frequencies among the weights, several files with an index."""
    theirs = stock_model(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    keys = json.loads(path.read_text())
    del keys["rope_parameters"], keys["attention_bias"]
    path.write_text(json.dumps({**keys, "rotary_pct": 0.25, "rotary_emb_base": 10000}))
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    for block in range(2):
        tensors[f"gpt_neox.layers.{block}.attention.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.bool)
        tensors[f"gpt_neox.layers.{block}.attention.masked_bias"] = torch.tensor(-1e9)
        tensors[f"gpt_neox.layers.{block}.attention.rotary_emb.inv_freq"] = torch.ones(1)
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:10], "model-00002-of-00002.safetensors": names[10:]}
    for part, held in parts.items():
        save_file({name: tensors[name] for name in held}, tmp_path / "hf" / part, metadata={"format": "pt"})
    (tmp_path / "hf" / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {name: part for part, held in parts.items() for name in held}}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))

    from_hugging_face(tmp_path / "hf", tmp_path / "ours", with_tokenizer=False, report=quiet)
    tokens = random_tokens(1, LONG)
    assert (load_model(tmp_path / "ours")[0](tokens) - theirs(tokens).logits).abs().max() < 1e-4


@torch.no_grad()
def test_pickled_weights_are_read_as_tensors_or_refused(tmp_path):
    theirs = stock_model(tmp_path / "hf")
    weights, pickled = tmp_path / "hf" / "model.safetensors", tmp_path / "hf" / "pytorch_model.bin"
    torch.save(load_file(weights), pickled)
    weights.unlink()
    from_hugging_face(tmp_path / "hf", tmp_path / "ours", with_tokenizer=False, report=quiet)
    tokens = random_tokens(1, LONG)
    assert (load_model(tmp_path / "ours")[0](tokens) - theirs(tokens).logits).abs().max() < 1e-4

    class Exploit:
        def __reduce__(self):
            return (tmp_path / "owned").write_text, ("owned",)

    torch.save({"gpt_neox.embed_in.weight": Exploit()}, pickled)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: refused"):
        from_hugging_face(tmp_path / "hf", tmp_path / "theirs", with_tokenizer=False, report=quiet)
    assert not (tmp_path / "owned").exists()
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize("pos_emb", ["rotary", "kerple_log", "rpe", "learned"])
@torch.no_grad()
def test_what_went_out_comes_back(pos_emb, tmp_path):
    model, config = make_model(pos_emb, gpt_j_residual=True)
    to_hugging_face(model, config, tmp_path / "hf", dtype=torch.bfloat16, report=quiet)
    (tmp_path / "hf" / "modeling_kerple.py").write_text("raise SystemExit('the folder is not to be run')")
    from_hugging_face(tmp_path / "hf", tmp_path / "ours", with_tokenizer=False, report=quiet)
    step = tmp_path / "ours" / "global_step0"
    state = torch.load(step / "layer_02-model_00-model_states.pt", weights_only=True)
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    tokens = random_tokens(1, 32)
    assert torch.equal(load_model(tmp_path / "ours")[0](tokens), model.bfloat16().float()(tokens))


def test_the_tokenizer_comes_along(tmp_path):
    stock_model(tmp_path / "hf")
    tokenizer = train_bpe(KINDS.values(), 400)
    tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    from_hugging_face(tmp_path / "hf", tmp_path / "ours", report=quiet)
    shutil.rmtree(tmp_path / "hf")
    _, config = load_model(tmp_path / "ours")
    ours = TokenizerFiles.of(config).build()
    assert ours.tokenize(KINDS["python"]) == tokenizer.encode(KINDS["python"]).ids


def edit(folder, **keys: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported"),
        ({"hidden_act": "mish"}, "hidden_act 'mish'"),
        ({"intermediate_size": 100}, "intermediate_size 100 is not supported; only 128"),
        ({"attention_bias": False}, "attention_bias False is not supported"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate False of rope_type"),
        ({"num_hidden_layers": 3}, r"lacks gpt_neox\.layers\.2\.input_layernorm\.weight.* and 9 more"),
        ({"num_hidden_layers": 1}, r"contains gpt_neox\.layers\.1.*which the model in config\.json does not have"),
        ({"vocab_size": 500}, r"shape \(512, 32\), but config\.json implies \(500, 32\)"),
        ({"num_attention_heads": 5}, "not divisible by num_attention_heads 5"),
    ],
)
def test_what_does_not_fit_is_named(keys, message, tmp_path):
    stock_model(tmp_path / "hf")
    edit(tmp_path / "hf", **keys)
    with pytest.raises(UserError, match=message):
        from_hugging_face(tmp_path / "hf", tmp_path / "ours", with_tokenizer=False, report=quiet)
    assert not (tmp_path / "ours").exists()


def test_missing_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"config\.json: cannot be read"):
        from_hugging_face(tmp_path / "nothing", tmp_path / "ours", report=quiet)
    stock_model(tmp_path / "hf")
    with pytest.raises(UserError, match="neither tokenizer"):
        from_hugging_face(tmp_path / "hf", tmp_path / "ours", report=quiet)
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read"):
        from_hugging_face(tmp_path / "hf", tmp_path / "ours", with_tokenizer=False, report=quiet)
    (tmp_path / "hf" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="there are no weights to convert"):
        from_hugging_face(tmp_path / "hf", tmp_path / "ours", with_tokenizer=False, report=quiet)
    assert not (tmp_path / "ours").exists()
