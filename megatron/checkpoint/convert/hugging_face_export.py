"""A model of this project as a Hugging Face folder.

Rotary models become a GPTNeoXForCausalLM, which transformers has itself. Any other becomes a model whose code is in the
folder: the modelling files, the positional method's sources, weights, tokenizer.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kerple.positional import method_class
from megatron.checkpoint.convert.compare import check_same_logits, check_same_rotary_logits
from megatron.checkpoint.convert.folder import new_folder
from megatron.checkpoint.convert.hugging_face_config import is_stock, self_contained_keys, stock_keys
from megatron.checkpoint.convert.model_card import model_card
from megatron.checkpoint.convert.names import POSITIONAL_TARGET
from megatron.checkpoint.convert.sources import load_package, self_contained_files, unload_package
from megatron.checkpoint.convert.tokenizer_files import TokenizerFiles, special_ids, write_tokenizer
from megatron.checkpoint.convert.weights import SAFETENSORS, cast, hugging_face_tensors, import_transformers, rounded
from megatron.checkpoint.storage import CheckpointError, write_json
from megatron.config import Config
from megatron.model.gpt import GPT


def to_hugging_face(
    model: GPT,
    config: Config,
    output: str | Path,
    *,
    tokenizer: TokenizerFiles | None = None,
    dtype: torch.dtype = torch.float32,
    report: Callable[[str], None] = print,
) -> None:
    """Write `model` to the new folder `output`, for `AutoModelForCausalLM.from_pretrained`.

    model, config: as `megatron.inference.load_model` gives them. tokenizer: written beside the model; None for none.
    dtype: of the weights in the file; the comparison is with the model's weights rounded to it.
    Raises CheckpointError, and writes nothing, if the folder that was written does not give the model's logits, in
    float32, to 1e-4; UserError for a tokenizer that is missing or does not fit.
    """
    if config.model.pos_emb_options.get("scaling") == "random":
        raise CheckpointError(
            "pos_emb rotary with scaling random: the random positions are not part of a model to hand on; export it "
            "without the scaling"
        )
    import_transformers()
    settings, stock = model.settings, is_stock(config)
    what = "GPTNeoXForCausalLM" if stock else f"self-contained model ({config.model.pos_emb})"
    with new_folder(output) as folder:
        keys = (stock_keys if stock else self_contained_keys)(config, settings)
        keys["dtype"] = keys["torch_dtype"] = str(dtype).removeprefix("torch.")
        if tokenizer is not None:
            eod = write_tokenizer(tokenizer, folder, settings.padded_vocab_size)
            keys.update(special_ids(eod))
            write_json(folder / "generation_config.json", special_ids(eod))
        else:
            keys.update(dict.fromkeys(special_ids(0)))
        write_json(folder / "config.json", keys)
        tensors = hugging_face_tensors(model, dtype)
        if not stock:
            tensors.update(_buffers(model, dtype))
            for name, text in self_contained_files(method_class(config.model.pos_emb)).items():
                (folder / name).write_text(text, encoding="utf-8")
        save_file(tensors, folder / SAFETENSORS, metadata={"format": "pt"})
        card = model_card(config, stock=stock, has_tokenizer=tokenizer is not None)
        (folder / "README.md").write_text(card, encoding="utf-8")
        written = load_written(folder, stock)
        check = check_same_rotary_logits if stock else check_same_logits
        check(
            rounded(model, dtype),
            lambda tokens: written(tokens, use_cache=False).logits,
            settings.padded_vocab_size,
            config,
            f"{output}: {what}",
            report,
        )


def _buffers(model: GPT, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Buffers of the positional methods, all of which the self-contained model keeps in its file."""
    methods = model.positional_methods()
    found = {}
    for index, method in methods.items():
        number = 0 if len(methods) == 1 else index - 2
        for name, buffer in method.named_buffers():
            found[POSITIONAL_TARGET.format(method=number) + name] = cast(buffer, dtype)
    return found


def load_written(folder: Path, stock: bool) -> Any:
    """The model in a folder that was written here, float32, in evaluation mode."""
    transformers = import_transformers()
    if stock:
        return transformers.GPTNeoXForCausalLM.from_pretrained(folder).float().eval()
    # The files are imported where they are; the library's own way would leave a copy in the user's cache.
    name = f"_written_model_{os.getpid()}"
    try:
        module = load_package(folder, name)
        return module.KerpleForCausalLM.from_pretrained(folder).float().eval()
    finally:
        unload_package(name)
