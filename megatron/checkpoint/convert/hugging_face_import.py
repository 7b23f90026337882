"""A Hugging Face folder as a checkpoint of this project: GPT-NeoX and Pythia, and what `to_hugging_face` wrote."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kerple.positional import method_class
from megatron.checkpoint.convert.compare import check_same_logits, check_same_rotary_logits
from megatron.checkpoint.convert.folder import new_folder
from megatron.checkpoint.convert.hugging_face_config import keys_from
from megatron.checkpoint.convert.layout import write_checkpoint
from megatron.checkpoint.convert.names import layers_with_weights
from megatron.checkpoint.convert.sources import load_package, self_contained_files, unload_package
from megatron.checkpoint.convert.tokenizer_files import read_json, take_tokenizer
from megatron.checkpoint.convert.weights import SAFETENSORS, cast, fill, import_transformers, read_tensors
from megatron.checkpoint.layers import layer_state, load_layers
from megatron.config import Config
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings


def from_hugging_face(
    source: str | Path,
    output: str | Path,
    *,
    with_tokenizer: bool = True,
    dtype: torch.dtype | None = None,
    report: Callable[[str], None] = print,
) -> None:
    """Write the model of a Hugging Face folder to the new folder `output`, as the checkpoint of iteration 0.

    source: holds config.json, weights (safetensors, or a .bin file of tensors alone) and, if `with_tokenizer`, a
    tokenizer. dtype: of the weights in the layer files; default: that of the source's embedding.
    No code of the folder is run: a model of our own kind is compared with this project's modelling files.
    Raises CheckpointError, and writes nothing, if the model has something this project has not, a tensor is missing or
    of another shape, or the checkpoint's logits differ from the source's by more than 1e-4 in float32.
    """
    source, output = Path(source), Path(output).absolute()
    import_transformers()
    theirs = read_json(source / "config.json")
    keys = keys_from(theirs, str(source / "config.json"))
    tensors = read_tensors(source)
    with new_folder(output) as folder:
        if with_tokenizer:
            keys.update(take_tokenizer(source, folder, output, keys["padded_vocab_size"]))
        config = Config.from_flat(keys, source=str(source / "config.json"))
        settings = ModelSettings.from_config(config, config.model.padded_vocab_size)
        written = GPT(settings).eval()
        stored = dtype or next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
        fill(written, _without_buffers(tensors, written), source)
        reference = _reference(source, theirs, tensors)
        states = (
            (index, [{name: cast(tensor, stored) for name, tensor in layer_state(layer).items()}])
            for index, layer in layers_with_weights(written).items()
        )
        step = write_checkpoint(folder, 0, states, keys, settings)
        if dtype is not None:
            reference = reference.to(dtype).float()
        load_layers(layers_with_weights(written), step)
        check = check_same_rotary_logits if theirs["model_type"] == "gpt_neox" else check_same_logits
        check(
            written,
            lambda tokens: reference(tokens, use_cache=False).logits,
            settings.padded_vocab_size,
            config,
            f"{output}: checkpoint from {source}",
            report,
        )


def _without_buffers(tensors: dict[str, Tensor], model: GPT) -> dict[str, Tensor]:
    """Without the positional methods' buffers, which our layer files do not hold."""
    computed = {
        name
        for method in model.positional_methods().values()
        for name, _ in method.named_buffers()
        if name not in method.state_dict()
    }
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not (name.startswith("gpt_neox.positional.") and name.split(".", 3)[3] in computed)
    }


def _reference(source: Path, theirs: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """The source's model as transformers runs it, float32."""
    transformers = import_transformers()
    if theirs["model_type"] == "gpt_neox":
        whole = any((source / name).is_file() for name in (SAFETENSORS, f"{SAFETENSORS}.index.json"))
        if whole:
            model = transformers.GPTNeoXForCausalLM.from_pretrained(source, use_safetensors=True)
        else:
            config = transformers.GPTNeoXConfig.from_pretrained(source)
            model = transformers.GPTNeoXForCausalLM.from_pretrained(None, config=config, state_dict=tensors)
        return model.float().eval()
    name = f"_reference_model_{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        for file, text in self_contained_files(method_class(theirs["positional_method"])).items():
            (Path(folder) / file).write_text(text, encoding="utf-8")
        try:
            module = load_package(Path(folder), name)
            config = module.KerpleConfig(**theirs)
            return module.KerpleForCausalLM.from_pretrained(None, config=config, state_dict=tensors).float().eval()
        finally:
            unload_package(name)
