"""Exported models behave like the models in transformers: training, generation, other heads,
devices, LoRA and quantization.
"""

import warnings

import peft
import pytest
import torch
import torch.nn.functional as F
from bitsandbytes.nn import Linear4bit
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

from tests.support.checkpoints import TRAIN_LENGTH
from tests.support.conversion import LONG, greedy, random_tokens
from tests.support.exported import export, load


def gradients(model, tokens) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("pos_emb", "use_reentrant"), [("kerple_log", True), ("dape_v2_kerple", False)]
)
def test_gradient_checkpointing_gives_the_same_gradients(pos_emb, use_reentrant):
    _, path = export(pos_emb)
    model, tokens = load(path).train(), random_tokens(2, TRAIN_LENGTH)
    expected = gradients(model, tokens)
    calls = []
    model.gpt_neox.layers[0].attention.register_forward_pre_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    for name, gradient in gradients(model, tokens).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
    assert len(calls) == 2  # recomputed in the backward pass


def test_autocast_gives_similar_gradients():
    """As in Trainer with bf16: scores and the positional method are computed in float32."""
    _, path = export("fire")
    model, tokens = load(path).train(), random_tokens(2, TRAIN_LENGTH)
    expected = gradients(model, tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = gradients(model, tokens)
    for name in [
        name for name in expected if ".positional." in name and name.endswith((".c", ".weight"))
    ]:
        assert (rounded[name] - expected[name]).norm() < 0.1 * expected[name].norm(), name


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains with Trainer, and returns the first logged (loss, gradient norm)."""
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # set by training in other tests
        monkeypatch.delenv(variable, raising=False)

    def run(model, rows, **options) -> tuple[float, float]:
        options = {"max_steps": 1, "logging_steps": 1, "max_grad_norm": 1e9, **options}
        arguments = TrainingArguments(
            str(tmp_path), report_to=[], save_strategy="no", use_cpu=True, **options
        )
        trainer = Trainer(model, arguments, train_dataset=rows)
        assert trainer.train().global_step == options["max_steps"]
        return trainer.state.log_history[0]["loss"], trainer.state.log_history[0]["grad_norm"]

    return run


@pytest.mark.ci
def test_trainer_with_gradient_checkpointing(train):
    _, path = export("kerple_log")
    model = load(path)
    before = model.gpt_neox.positional.bias_p.detach().clone()
    rows = [{"input_ids": row, "labels": row} for row in random_tokens(4, TRAIN_LENGTH)]
    train(model, rows, max_steps=2, per_device_train_batch_size=2, gradient_checkpointing=True)
    assert not torch.equal(model.gpt_neox.positional.bias_p, before)


@torch.no_grad()
def smoothed_loss(model, tokens, share) -> float:
    """The label-smoothed loss of the next tokens, in float64."""
    predictions = model(tokens).logits[:, :-1].double().log_softmax(-1)
    right = predictions.gather(-1, tokens[:, 1:, None]).mean()
    return -float((1 - share) * right + share * predictions.mean())


@pytest.mark.ci
def test_trainer_with_label_smoothing_predicts_the_next_token(train):
    _, path = export("kerple_log")
    model, tokens = load(path), random_tokens(4, TRAIN_LENGTH)
    expected = smoothed_loss(model, tokens, 0.1)
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    loss, _ = train(model, rows, label_smoothing_factor=0.1, per_device_train_batch_size=4)
    assert loss == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("kind", ["language model", "classifier"])
@pytest.mark.quick(1)
def test_accumulation_steps_change_neither_loss_nor_gradient(kind, train):
    _, path = export("kerple_log")
    rows = [
        {"input_ids": row, "labels": row if kind == "language model" else index % 3}
        for index, row in enumerate(random_tokens(4, TRAIN_LENGTH))
    ]
    results = []
    for steps in (1, 4):
        torch.manual_seed(0)  # of the classifier's head
        auto = (
            {}
            if kind == "language model"
            else {"auto": AutoModelForSequenceClassification, "num_labels": 3}
        )
        options = {"per_device_train_batch_size": 4 // steps, "gradient_accumulation_steps": steps}
        results.append(train(load(path, **auto), rows, **options))
    assert results[0] == pytest.approx(results[1], rel=1e-4)


@pytest.mark.parametrize(
    "auto", [AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification]
)
@torch.no_grad()
def test_unknown_arguments_are_rejected_by_name(auto):
    """A cache under a new name must not be ignored: the text would be predicted without context."""
    _, path = export("kerple_log")
    model, tokens = load(path, auto), random_tokens(1, 8)
    with pytest.raises(TypeError, match="new_name_of_cache"):
        model(tokens, new_name_of_cache=None)
    model(tokens, token_type_ids=torch.zeros_like(tokens))  # from tokenizers; has no meaning here


@torch.no_grad()
def test_both_names_of_the_cache():
    _, path = export("kerple_log")
    model, tokens = load(path), random_tokens(1, 12)
    expected = model(tokens).logits[:, 8:]
    for name in ("cache", "past_key_values"):
        cache = model.new_cache()
        model(tokens[:, :8], **{name: cache})
        assert (model(tokens[:, 8:], **{name: cache}).logits - expected).abs().max() < 1e-4
    with pytest.raises(ValueError, match="past_key_values"):
        model(tokens, cache=cache, past_key_values=cache)


@pytest.mark.parametrize("pos_emb", ["kerple_log", "dape_kerple"])
def test_loaded_parameters_are_not_initialized_again(pos_emb):
    """transformers 5.0 and 5.10 call `_init_weights` for all modules of a class that does not come
    from AutoModel.
    """
    _, path = export(pos_emb)
    model = load(path)
    method = next(
        module for name, module in model.named_modules() if name.endswith("positional") and module
    )
    loaded = {name: value.clone() for name, value in method.state_dict().items()}
    for is_loaded in (True, False):
        for parameter in method.parameters():
            parameter._is_hf_initialized = is_loaded
        model._init_weights(method)
        same = [torch.equal(value, loaded[name]) for name, value in method.state_dict().items()]
        assert all(same) == is_loaded


@torch.no_grad()
def test_other_auto_classes():
    _, path = export("fire")
    tokens = random_tokens(2, TRAIN_LENGTH)
    base = load(path, AutoModel)
    states = base(tokens).last_hidden_state
    assert (
        load(path)(tokens, output_hidden_states=True).hidden_states[-1] - states
    ).abs().max() < 1e-5
    classifier = load(path, AutoModelForSequenceClassification, num_labels=3)
    padded = F.pad(tokens, (5, 0))  # with the padding token, 0
    logits = classifier(padded, attention_mask=(padded != 0).long()).logits
    assert (logits - classifier.score(states[:, -1])).abs().max() < 1e-4
    assert classifier(tokens, labels=torch.tensor([0, 2])).loss.isfinite()


def test_lora(tmp_path):
    _, path = export("kerple_log")
    tokens = random_tokens(2, TRAIN_LENGTH)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["query_key_value"], init_lora_weights=False
    )
    model = peft.get_peft_model(load(path), config)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.train()(tokens, labels=tokens).loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(trained) == 4
    assert all("lora" in name for name in trained)
    model.eval().save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(tokens).logits
        again = peft.PeftModel.from_pretrained(load(path), str(tmp_path))
        assert torch.equal(again(tokens).logits, expected)
        assert (again.merge_and_unload()(tokens).logits - expected).abs().max() < 1e-4
        assert (load(path)(tokens).logits - expected).abs().max() > 1e-3


VIRTUAL = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}


@pytest.mark.parametrize(
    ("pos_emb", "kind"),
    [
        ("kerple_log", peft.PrefixTuningConfig),
        ("kerple_log", peft.PromptTuningConfig),
        ("forgetting", peft.PromptTuningConfig),
    ],
)
@torch.no_grad()
def test_virtual_tokens_of_peft(pos_emb, kind):
    _, path = export(pos_emb)
    torch.manual_seed(0)
    model = peft.get_peft_model(load(path), kind(**VIRTUAL)).eval()
    prompt = random_tokens(2, 9)
    expected = prompt
    for _ in range(5):
        expected = torch.cat((expected, model(expected).logits[:, -1:].argmax(-1)), dim=1)
    options = {"input_ids": prompt, "max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    for use_cache in (True, False):
        assert torch.equal(model.generate(**options, use_cache=use_cache), expected)


def test_prefix_tuning_with_a_decay_is_rejected():
    model = peft.get_peft_model(load(export("forgetting")[1]), peft.PrefixTuningConfig(**VIRTUAL))
    with pytest.raises(ValueError, match="prefix tuning"):
        model(random_tokens(1, 5))


@torch.no_grad()
def test_packed_sequences_of_a_collator():
    _, path = export("kerple_log")
    model = load(path)
    rows = [random_tokens(1, length, seed=length)[0] for length in (5, 11, 4)]
    collator = DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_seq_idx=True, return_tensors="pt"
    )
    batch = collator([{"input_ids": row.tolist()} for row in rows])
    assert batch.keys() >= {"cu_seq_lens_q", "max_length_k", "seq_idx", "position_ids"}
    logits = model(**batch).logits
    expected = torch.cat([model(row[None]).logits for row in rows], dim=1)
    assert (logits - expected).abs().max() < 1e-4
    del batch["position_ids"]
    with pytest.raises(ValueError, match="need position_ids"):
        model(**batch)


@torch.no_grad()
def test_generation_warns_about_nothing(caplog):
    _, path = export("alibi")
    load(path).generate(random_tokens(1, 5), max_new_tokens=2, pad_token_id=0)
    assert "cache_position" not in caplog.text


@torch.no_grad()
def test_folders_of_the_same_name(tmp_path):
    """transformers caches classes by the name of the folder and the code, as in checkpoints of
    Trainer.
    """
    tokens = random_tokens(1, 8)
    for pos_emb in ("kerple_log", "alibi"):
        model, path = export(pos_emb)
        load(path).save_pretrained(tmp_path / pos_emb / "checkpoint-2")
        again = load(tmp_path / pos_emb / "checkpoint-2")
        assert (again(tokens).logits - model(tokens)).abs().max() < 1e-4


@torch.no_grad()
def test_device_map():
    model, path = export("dape_kerple")
    tokens = random_tokens(1, TRAIN_LENGTH)
    theirs = load(path, device_map="auto")
    assert (theirs(tokens).logits - model(tokens)).abs().max() < 1e-4


@pytest.mark.parametrize("pos_emb", ["kerple_log", "dape_kerple"])
@torch.no_grad()
def test_offloaded_layers(pos_emb, tmp_path):
    """The layers, but not the parameters of the positional method."""
    model, path = export(pos_emb)
    tokens = random_tokens(1, TRAIN_LENGTH)
    kept = ("gpt_neox.embed_in", "gpt_neox.positional", "gpt_neox.final_layer_norm", "embed_out")
    devices = {**dict.fromkeys(kept, "cpu"), "gpt_neox.layers": "disk"}
    layers_offloaded = load(path, device_map=devices, offload_folder=tmp_path / "layers")
    all_offloaded = load(path, device_map={"": "disk"}, offload_folder=tmp_path / "all")
    assert layers_offloaded.gpt_neox.layers[0].mlp.dense_4h_to_h.weight.is_meta
    with pytest.raises(ValueError, match="parameters of the positional method are offloaded"):
        all_offloaded(tokens)
    if pos_emb == "kerple_log":
        assert (layers_offloaded(tokens).logits - model(tokens)).abs().max() < 1e-4
    else:
        with pytest.raises(ValueError, match="parameters of the positional method are offloaded"):
            layers_offloaded(tokens)


@pytest.mark.ci
@torch.no_grad()
def test_compiled_without_graph_breaks():
    torch.compiler.reset()
    model, path = export("kerple_log")
    theirs = load(path)
    compiled = torch.compile(theirs, backend="eager", fullgraph=True)
    tokens = random_tokens(2, TRAIN_LENGTH)
    assert (compiled(tokens).logits - model(tokens)).abs().max() < 1e-4
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    expected = theirs(tokens, attention_mask=mask).logits
    difference = compiled(tokens, attention_mask=mask).logits - expected
    assert difference[mask.bool()].abs().max() < 1e-4


@pytest.mark.parametrize("pos_emb", ["kerple_log", "dape_v2_kerple", "forgetting"])
@torch.no_grad()
@pytest.mark.quick(1)
def test_generation_beyond_the_training_length(pos_emb):
    model, path = export(pos_emb)
    theirs = load(path)
    prompt = random_tokens(1, TRAIN_LENGTH - 4)
    expected = greedy(model, prompt, 12).tolist()

    def generate(**options):
        torch.manual_seed(0)
        return theirs.generate(prompt, max_new_tokens=12, eos_token_id=None, **options).tolist()

    for options in (
        {},
        {"prompt_lookup_num_tokens": 2},
        {"assistant_model": load(path)},
        {"assistant_early_exit": 1},
        {"cache_implementation": "static"},
    ):
        assert generate(do_sample=False, **options) == expected
    for options in ({"do_sample": True, "top_k": 50}, {"num_beams": 3, "do_sample": False}):
        assert generate(**options) == generate(use_cache=False, **options)


@pytest.mark.parametrize("pos_emb", ["kerple_log", "dape_rotary"])
@torch.no_grad()
@pytest.mark.quick(1)
def test_generation_with_a_static_cache_and_padding(pos_emb):
    _, path = export(pos_emb)
    theirs = load(path)
    prompt = random_tokens(2, LONG)
    mask = torch.ones_like(prompt)
    mask[0, :9] = 0
    options = {
        "attention_mask": mask,
        "max_new_tokens": 6,
        "do_sample": False,
        "eos_token_id": None,
    }
    expected = theirs.generate(prompt, **options)
    assert torch.equal(theirs.generate(prompt, cache_implementation="static", **options), expected)


# The errors of kerple_log, which has no layers of its own, are 0.022, 0.35 and 0.059. Noise is
# above 1.
BOUNDS = {"8-bit": 0.05, "4-bit": 0.6, "dynamic": 0.1}


def quantized(path, kind: str) -> nn.Module:
    if kind == "dynamic":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.ao.quantization.quantize_dynamic(
                load(path), {nn.Linear, nn.Conv2d}, dtype=torch.qint8
            )
    keys = {"8-bit": {"load_in_8bit": True}, "4-bit": {"load_in_4bit": True}}[kind]
    model = load(path, quantization_config=BitsAndBytesConfig(**keys), device_map="cpu")
    for module in model.modules():
        if isinstance(module, Linear4bit):  # the kernel for AVX-512 needs a multiple of 32 outputs
            module.support_avx512bf16_for_cpu = False
    return model


@pytest.mark.parametrize(
    ("pos_emb", "kind"),
    [
        ("fire", "4-bit"),
        *(pytest.param("fire", kind, marks=pytest.mark.ci) for kind in ("8-bit", "dynamic")),
        pytest.param("dape_v2_fire", "8-bit", marks=pytest.mark.ci),
        pytest.param("forgetting", "4-bit", marks=pytest.mark.ci),
        pytest.param("transformer_xl", "dynamic", marks=pytest.mark.ci),
    ],
)
@torch.no_grad()
def test_quantized_models_predict_almost_the_same(pos_emb, kind):
    _, path = export(
        pos_emb, hidden_size=64 if kind == "4-bit" else 32
    )  # bitsandbytes' blocks have 64 weights
    model, tokens = load(path), random_tokens(1, 48)
    smaller, expected = quantized(path, kind), model(tokens).logits
    error = (smaller(tokens).logits.float() - expected).norm() / expected.norm()
    assert 0.001 < error < BOUNDS[kind]
    exact = model.state_dict()
    kept = {
        name: value
        for name, value in smaller.state_dict().items()
        if ".first." in name or ".second." in name
    }
    assert len(kept) == {"fire": 8, "dape_v2_fire": 16}.get(pos_emb, 0)
    assert all(torch.equal(value, exact[name]) for name, value in kept.items())


@pytest.mark.parametrize(
    ("pos_emb", "adapted"), [("dape_v2_fire", 0), ("forgetting", 2), ("transformer_xl", 2)]
)
def test_lora_in_all_linear_layers(pos_emb, adapted):
    """Every adapter has a gradient: there is none in the MLPs of FIRE and DAPE."""
    _, path = export(pos_emb)
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(load(path), config)
    model(random_tokens(1, 8)).logits.square().sum().backward()
    adapters = {name: parameter for name, parameter in model.named_parameters() if "lora_A" in name}
    assert len(adapters) == 8 + adapted
    assert all(parameter.grad.abs().max() > 0 for parameter in adapters.values())


def test_lora_in_the_mlp_of_a_method_is_rejected():
    _, path = export("fire")
    with pytest.raises(ValueError, match="MLPLayer"):
        peft.get_peft_model(load(path), peft.LoraConfig(target_modules=["first"]))
    model = peft.get_peft_model(load(path), peft.LoraConfig(target_parameters=["first.weight"]))
    with pytest.raises(AttributeError, match="weight_and_bias"):
        model(random_tokens(1, 8))


def test_the_mlp_of_a_method_can_be_trained_as_a_whole():
    _, path = export("fire")
    config = peft.LoraConfig(
        target_modules=["query_key_value"], modules_to_save=["first", "second"]
    )
    model = peft.get_peft_model(load(path), config)
    model(random_tokens(1, 8)).logits.square().sum().backward()
    gradients = [
        p.grad for name, p in model.named_parameters() if "positional" in name and p.requires_grad
    ]
    assert len(gradients) == 8
    assert all(gradient.abs().max() > 0 for gradient in gradients)
