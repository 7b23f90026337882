"""Hugging Face folders: writing a model as one, and reading one as a checkpoint of this project.

Rotary models are written as a GPTNeoXForCausalLM, LlamaForCausalLM, MistralForCausalLM,
Qwen2ForCausalLM or Qwen3ForCausalLM, which are part of transformers. Other models are written with
their code: modeling files, and the sources of the positional method. These five families, and all
models written by this module, can be read.
"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kerple.attention import FULL_MODE, Mode, parse_mode
from kerple.positional.wrappers import Randomized
from megatron.checkpoint.configuration import changed_code_notice, check_trained_tokenizer
from megatron.checkpoint.layers import load_layers
from megatron.checkpoint.storage import CheckpointError, read_json, write_json
from megatron.config import Config
from megatron.convert.card import model_card
from megatron.convert.hugging_face_config import (
    KNOWN_KEYS,
    POSITIONAL_CODE,
    TRAINED_DOCUMENTS,
    config_from,
    self_contained_config,
    stock_config,
    stock_type,
)
from megatron.convert.output import (
    check_same_logits,
    compared_lengths,
    largest_difference,
    new_folder,
    rounded,
    with_float32_angles,
    write_checkpoint,
)
from megatron.convert.sources import modeling_file, write_self_contained_files
from megatron.convert.tokenizer_files import (
    SPECIAL_IDS,
    TOKENIZER_IDS,
    copy_tokenizer,
    digest_of_ids,
    find_tokenizer,
    write_tokenizer,
)
from megatron.convert.weights import (
    SAFETENSORS,
    check_finite,
    check_tensors,
    common_dtype,
    fill,
    hugging_face_tensors,
    layers_with_weights,
    positional_prefixes,
    read_hugging_face,
)
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings
from megatron.tokenizer.tokenizer import TokenizerFiles
from megatron.utils.errors import first_line, import_package
from megatron.utils.ranks import Report

# Keys of config.json that do not say what a model computes, but how, or what it returns. Some make
# transformers download or import code. (`config_from` rejects quantized models.)
_NOT_OF_THE_MODEL = frozenset(("auto_map", "quantization_config", "transformers_weights"))
_NOT_OF_THE_MODEL |= {"attn_implementation", "_attn_implementation", "experts_implementation"}
_NOT_OF_THE_MODEL |= {"_attn_implementation_internal", "_experts_implementation_internal"}
_NOT_OF_THE_MODEL |= {"_experts_implementation", "fusion_config", "distributed_config"}
_NOT_OF_THE_MODEL |= {"return_dict", "torchscript", "output_attentions", "output_hidden_states"}


def to_hugging_face(
    model: GPT,
    config: Config,
    output: str | Path,
    *,
    tokenizer: TokenizerFiles | None = None,
    dtype: torch.dtype = torch.float32,
    inference_mode: str | None = None,
    allow_other_tokenizer: bool = False,
    report: Report = print,
) -> None:
    """Write `model` to the new folder `output`, for `AutoModelForCausalLM.from_pretrained`.

    Args:
        model, config: as returned by `megatron.inference.load_model`.
        tokenizer: written next to the model; None to omit it.
        dtype: of the weights in the file. Logits are compared with those of the model's weights
            rounded to it.
        inference_mode: how the model attends, such as `sinks@4+508`
            (`kerple.attention.inference.mode`). Models of transformers have none but `full`, so the
            model is then self-contained.
        allow_other_tokenizer: write `tokenizer` although the model was trained with another one.

    Raises:
        CheckpointError: if the model was trained with another tokenizer, or the written model does
            not give the same logits, to 1e-4 in float32. Nothing is written.
        UserError: if the tokenizer is missing or has more tokens than the model, or if the model
            does not support the inference mode.
    """
    # Models that cannot be exported.
    if any(isinstance(module, Randomized) for module in model.modules()):
        raise CheckpointError(
            "pos_emb_options random_range: a model with random positions cannot be exported; "
            "evaluate and generate with the checkpoint itself"
        )
    if isinstance(config.model.window, tuple):
        raise CheckpointError(
            "sliding_window_width: a list, which gives layers different windows, cannot be "
            "exported; evaluate and generate with the checkpoint itself"
        )

    # A class of transformers, or the model's own code.
    import_transformers()
    padded_vocab_size, stock = model.settings.padded_vocab_size, stock_type(config)
    mode = FULL_MODE
    if inference_mode is not None:
        mode = mode_of(inference_mode, model, config)
    if stock is not None and mode != FULL_MODE:
        report(
            f"{output}: transformers' {stock} has no inference modes, so the model is exported "
            "with its own code"
        )
        stock = None
    methods = model.positional_methods().values()
    if stock is None and any(method.length_dependent for method in methods):
        raise CheckpointError(
            "pos_emb rotary with scaling dynamic: transformers has no model with this structure, "
            "and the exported code cannot cache keys whose angles depend on the length; export the "
            "model without the scaling"
        )
    if config.model.release_bf16_distances:
        report(
            f"{output}: release_bf16_distances is not exported; distances and biases are exact in "
            "the written model"
        )
    with new_folder(output) as folder:
        # config.json, and the model's own code.
        architecture = None
        if stock is not None:
            values = stock_config(config.model, padded_vocab_size, stock)
            architecture = values["architectures"][0]
            kind = architecture
        else:
            values = self_contained_config(config.model, padded_vocab_size)
            values["inference_mode"] = None
            kind = f"self-contained model ({config.model.pos_emb})"
            if mode != FULL_MODE:
                values["inference_mode"] = mode.name
                kind += f", inference mode {mode.name}"
            values["auto_map"] = write_self_contained_files(
                folder, config.model.pos_emb, config.model.positional_options
            )
        values["dtype"] = values["torch_dtype"] = str(dtype).removeprefix("torch.")
        if tokenizer is not None:
            ids = write_tokenizer(tokenizer, folder, padded_vocab_size)
            trained, used = model.provenance.get("tokenizer"), tokenizer.build()
            check_trained_tokenizer(
                trained, used, allowed=allow_other_tokenizer, place="the checkpoint"
            )
            values.update(ids)
            values[TOKENIZER_IDS] = digest_of_ids(find_tokenizer(folder).build())
            write_json(folder / "generation_config.json", ids)
        else:
            values.update(dict.fromkeys(SPECIAL_IDS))
        values[TRAINED_DOCUMENTS] = model.provenance.get(TRAINED_DOCUMENTS, {})
        write_json(folder / "config.json", values)

        # Weights.
        tensors = hugging_face_tensors(model, dtype, stock or "kerple")
        check_finite(tensors, output)
        save_file(tensors, folder / SAFETENSORS, metadata={"format": "pt"})
        # safetensors writes files that only their owner can read, whatever the umask.
        shutil.copymode(folder / "config.json", folder / SAFETENSORS)

        # The description, and a comparison of the written model with this one.
        card = model_card(
            model, config, architecture=architecture, tokenizer=tokenizer, mode=mode.name
        )
        (folder / "README.md").write_text(card, encoding="utf-8")

        written, source = load_written(folder).float(), rounded(model, dtype)
        is_stock, name = stock is not None, f"{output}: {kind}"
        compare(source, written, is_stock, config, name, report, mode)


def mode_of(name: str, model: GPT, config: Config) -> Mode:
    """The inference mode with this name. Raises CheckpointError if it is not valid or the model
    does not support it.
    """
    try:
        mode = parse_mode(name, config.model.seq_length)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    methods = list(model.positional_methods().values())
    reason = mode.attention.unsupported_by(methods, config.model.windows, config.model.pos_emb)
    if reason is not None:
        raise CheckpointError(f"inference mode {mode.name} {reason}")
    return mode


def from_hugging_face(
    source: str | Path,
    output: str | Path,
    *,
    with_tokenizer: bool = True,
    dtype: torch.dtype | None = None,
    pos_emb_module: str | None = None,
    report: Report = print,
) -> None:
    """Write the model of a Hugging Face folder to the new folder `output`, as a checkpoint of
    iteration 0.

    No code in the folder is executed: a self-contained model is compared with this project's own
    modeling files.

    Args:
        source: contains config.json, weights (safetensors, or a .bin file of tensors only) and, if
            `with_tokenizer`, a tokenizer.
        dtype: of the weights in the layer files; default: that of the source, or float32 if the
            source has several.
        pos_emb_module: file or module that registers an external positional method.

    Raises:
        CheckpointError: if the model uses something this project does not support, a tensor is
            missing or has another shape, or the checkpoint's logits differ from the source's by
            more than 1e-4 in float32. Nothing is written.
    """
    # The configuration.
    source, output = Path(source), Path(output).absolute()
    import_transformers()
    theirs = read_json(source / "config.json")
    values = config_from(theirs, str(source / "config.json"))
    model_type, documents = str(theirs["model_type"]), theirs.get(TRAINED_DOCUMENTS, {})
    if theirs.get("inference_mode") is not None:
        report(
            f"note: a checkpoint has no inference_mode; name {theirs['inference_mode']} in "
            "kerple evaluate --modes or kerple generate --mode"
        )

    # Tensors. Their number limits the size of the model to build.
    tensors = read_hugging_face(source, model_type)
    if values["num_layers"] > len(tensors):
        raise CheckpointError(
            f"{source / 'config.json'}: num_hidden_layers is {values['num_layers']}, but the "
            f"folder has only {len(tensors)} tensors"
        )
    fingerprint = ""
    with new_folder(output) as folder:
        if with_tokenizer:
            keys, fingerprint = copy_tokenizer(
                source, folder, output, values["padded_vocab_size"], theirs.get(TOKENIZER_IDS)
            )
            values.update(keys)
        config = Config.from_flat(
            {**values, "pos_emb_module": pos_emb_module}, source=str(source / "config.json")
        )
        settings = ModelSettings(config.model, values["padded_vocab_size"])
        with torch.device("meta"):
            model = GPT(settings).eval()
        file_dtype = dtype or common_dtype(tensors.values())
        # Tensors that methods compute may be in the file, but are not needed.
        prefixes, methods = positional_prefixes(model), model.positional_methods().items()
        computed = {prefixes[index] + name for index, method in methods for name in method.computed}
        own_tensors = {name: tensor for name, tensor in tensors.items() if name not in computed}
        check_tensors(model, own_tensors, source, model_type)
        model = GPT(settings).eval()
        fill(model, own_tensors, model_type)

        # The code that the weights belong to is that of the export, not of the file in use.
        training = {"tokenizer": fingerprint, TRAINED_DOCUMENTS: documents}
        code = theirs.get(POSITIONAL_CODE)
        if code is not None:
            training["code"] = code
        if notice := changed_code_notice(code, config, f"{source} was exported"):
            report(notice)

        # Write the checkpoint, read it, and compare the logits.
        reference = load_reference(theirs, tensors)
        step = write_checkpoint(folder, model, file_dtype, values, training)
        if dtype is not None:
            for parameter in reference.parameters():
                parameter.data = parameter.data.to(dtype).float()
        load_layers(layers_with_weights(model), step)
        compare(
            model,
            reference,
            model_type != "kerple",
            config,
            f"{output}: checkpoint from {source}",
            report,
        )


def compare(
    ours: GPT,
    theirs: Any,
    stock: bool,
    config: Config,
    name: str,
    report: Report,
    mode: Mode = FULL_MODE,
) -> None:
    """Raises CheckpointError if the logits of a model of transformers differ. `name` describes the
    output.

    stock: it is part of transformers, so its angles are float32. It is compared with a copy of
    `ours` that has the same angles, and the effect of their rounding is reported.
    """

    def logits(tokens: Tensor) -> Tensor:
        output: Tensor = theirs(tokens, use_cache=False).logits
        return output

    def in_mode(tokens: Tensor) -> Tensor:
        expected: Tensor = ours(tokens, mode=mode.attention.at_length(tokens.shape[1]))
        return expected

    vocabulary = ours.settings.padded_vocab_size
    source: Callable[[Tensor], Tensor] = in_mode
    if stock:
        source = with_float32_angles(ours, theirs.base_model.rotary_emb.original_inv_freq)
    check_same_logits(source, logits, vocabulary, config, name, report)
    if stock:
        longest = compared_lengths(config)[-1]
        rounding = largest_difference(ours, logits, vocabulary, (longest,))
        report(
            f"{name}: transformers computes angles in float32, not float64; this changes the "
            f"logits by {rounding:.1e} at {longest}"
        )


def load_written(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model in a folder that `to_hugging_face` wrote, in evaluation mode."""
    name = read_json(folder / "config.json")["architectures"][0]
    if name != "KerpleForCausalLM":
        return getattr(import_transformers(), name).from_pretrained(folder, dtype=dtype).eval()
    # AutoModel would copy the code to the user's cache; import it from the folder instead.
    with modeling_file(folder) as module:
        return module.KerpleForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def load_reference(theirs: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """The float32 model that a user of transformers gets from a config.json and tensors.

    Raises CheckpointError if transformers cannot build or run it.
    """
    transformers = import_transformers()

    # A class of transformers, from all keys that its classes may read. AutoConfig chooses it, by
    # more than model_type, and imports no code of the folder.
    if theirs["model_type"] != "kerple":
        keys = {name: value for name, value in theirs.items() if name not in _NOT_OF_THE_MODEL}
        try:
            with tempfile.TemporaryDirectory() as folder:
                write_json(Path(folder) / "config.json", keys)
                config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            model = model_class.from_pretrained(
                None, config=config, state_dict=tensors, dtype=torch.float32
            )
            model = model.float().eval()
            model(torch.zeros(1, 1, dtype=torch.int64), use_cache=False)
        except Exception as error:  # each class has its own checks
            raise CheckpointError(
                f"config.json: transformers cannot build or run the model: {first_line(error)}"
            ) from error
        return model

    # This project's own keys; the inference mode is not compared.
    keys = {}
    for name, value in theirs.items():
        if name in KNOWN_KEYS and name != "model_type" and value is not None:
            keys[name] = value

    # Load this project's modeling files as a package of another name.
    with tempfile.TemporaryDirectory() as folder:
        write_self_contained_files(
            Path(folder), keys["positional_method"], keys.get("positional_options") or {}
        )
        with modeling_file(Path(folder)) as module:
            config = module.KerpleConfig(**keys)
            model_class = module.KerpleForCausalLM
            model = model_class.from_pretrained(
                None, config=config, state_dict=tensors, dtype=torch.float32
            )
            return model.float().eval()


def import_transformers() -> Any:
    """The transformers library. Raises UserError if it is not installed."""
    return import_package("transformers", "eval", "converting to or from Hugging Face")
