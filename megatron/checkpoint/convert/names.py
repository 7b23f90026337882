"""Names of tensors: in our layer files, which are the KERPLE release's and GPT-NeoX's, and in Hugging Face's GPT-NeoX.

Values need no change: both keep the rows of query_key_value grouped by head, [heads, 3, d].
"""

import re

from torch import nn

from megatron.checkpoint.layers import tensors_of
from megatron.checkpoint.storage import CheckpointError
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings

# Layer 0.
EMBEDDING = {"word_embeddings.weight": "gpt_neox.embed_in.weight"}

# Layers 2 ... L+1; Hugging Face counts them from 0.
BLOCK = {
    "input_layernorm.weight": "gpt_neox.layers.{block}.input_layernorm.weight",
    "input_layernorm.bias": "gpt_neox.layers.{block}.input_layernorm.bias",
    "attention.query_key_value.weight": "gpt_neox.layers.{block}.attention.query_key_value.weight",
    "attention.query_key_value.bias": "gpt_neox.layers.{block}.attention.query_key_value.bias",
    "attention.dense.weight": "gpt_neox.layers.{block}.attention.dense.weight",
    "attention.dense.bias": "gpt_neox.layers.{block}.attention.dense.bias",
    "post_attention_layernorm.weight": "gpt_neox.layers.{block}.post_attention_layernorm.weight",
    "post_attention_layernorm.bias": "gpt_neox.layers.{block}.post_attention_layernorm.bias",
    "mlp.dense_h_to_4h.weight": "gpt_neox.layers.{block}.mlp.dense_h_to_4h.weight",
    "mlp.dense_h_to_4h.bias": "gpt_neox.layers.{block}.mlp.dense_h_to_4h.bias",
    "mlp.dense_4h_to_h.weight": "gpt_neox.layers.{block}.mlp.dense_4h_to_h.weight",
    "mlp.dense_4h_to_h.bias": "gpt_neox.layers.{block}.mlp.dense_4h_to_h.bias",
}

# Layer L+3.
FINAL_NORM = {
    "norm.weight": "gpt_neox.final_layer_norm.weight",
    "norm.bias": "gpt_neox.final_layer_norm.bias",
}

# Layer L+4.
OUTPUT = {"final_linear.weight": "embed_out.weight"}

# Parameters of the positional method, in blocks or in the embedding: only the self-contained model has them. A method
# that all layers share is there once.
POSITIONAL = ("attention.rpe.", "position_embeddings.")
POSITIONAL_TARGET = "gpt_neox.positional.{method}."

# Names that some files have for the same tensors, and tensors that are computed.
SYNONYMS = {"lm_head.weight": "embed_out.weight"}
COMPUTED = re.compile(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)")


def table_of(index: int, settings: ModelSettings) -> dict[str, str]:
    """The table of the layer of this index, with the block's number filled in."""
    last = settings.num_layers
    if 2 <= index < last + 2:
        return {ours: theirs.format(block=index - 2) for ours, theirs in BLOCK.items()}
    return {0: EMBEDDING, last + 3: FINAL_NORM, last + 4: OUTPUT}[index]


def hugging_face_name(index: int, name: str, settings: ModelSettings, shared: bool) -> str:
    """The name of one of our tensors. Raises CheckpointError for a tensor that the tables do not hold."""
    for prefix in POSITIONAL:
        if name.startswith(prefix):
            method = 0 if shared or index == 0 else index - 2
            return POSITIONAL_TARGET.format(method=method) + name.removeprefix(prefix)
    table = table_of(index, settings)
    if name not in table:
        raise CheckpointError(f"layer {index}: {name} has no name in Hugging Face's model")
    return table[name]


def names_of(model: GPT) -> dict[tuple[int, str], str]:
    """(layer index, our name) -> Hugging Face's, for every tensor of the model; tied output weights are left out."""
    settings = model.settings
    shared = all(method.shared for method in model.positional_methods().values())
    return {
        (index, name): hugging_face_name(index, name, settings, shared)
        for index, layer in layers_with_weights(model).items()
        for name in tensors_of(layer)
    }


def layers_with_weights(model: GPT) -> dict[int, nn.Module]:
    """Layer index -> layer, of the layers that have weights of their own."""
    layers = model.layers()
    if model.settings.tied_embeddings:
        layers.pop(model.settings.num_layers + 4)
    return layers
