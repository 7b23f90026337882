"""A KERPLE-NeoX language model for the transformers library, with the positional method it was
trained with.

The positional method is in the `positional_*.py` files of this folder, unchanged from the training
code. `layers_kerple_*.py` has the layers, `attention_kerple_*.py` computes attention.

Legend: b batch, s new tokens, t all tokens (cached and new), h heads, d head size, e hidden size, v
vocabulary.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_layers import (
    GenericForSequenceClassification,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import can_return_tuple

from .attention_backend import Requirements
from .attention_kerple import Layout, check_ignored, implementations, tables_of
from .attention_mode import FULL_MODE, parse_mode
from .attention_tables import NO_TABLES
from .cache_kerple import ModeCache
from .configuration_kerple import KerpleConfig
from .layers_kerple import KerpleLayer, check_loaded, is_shared, make_norm, make_positional
from .positional_base import PositionalMethod
from .positional_method import Method

# How transformers names the cache in `generate` and in outputs: `cache` since version 5.24.
CACHE_NAME = "past_key_values"
if hasattr(BaseModelOutputWithPast, "cache"):
    CACHE_NAME = "cache"


def inference_mode(config, methods):
    """The attention mode of the configuration, for the methods of all layers; None: as in training.
    Raises ValueError for a mode that is not valid, or that the model does not support.
    """
    if config.inference_mode is None:
        return None
    mode = parse_mode(config.inference_mode, config.training_length)
    if mode == FULL_MODE:
        return None
    reason = mode.attention.unsupported_by(
        methods, [config.attention_window], config.positional_method
    )
    if reason is not None:
        raise ValueError(f"inference mode {mode.name} {reason}")
    return replace(mode.attention, span=mode.attention.span.within(config.attention_window))


def one_cache(cache, past_key_values):
    """The cache, under either of its names. Raises ValueError if both are given."""
    if cache is not None and past_key_values is not None:
        raise ValueError("give either cache or past_key_values: they are two names of one argument")
    if cache is None:
        return past_key_values
    return cache


class KerplePreTrainedModel(PreTrainedModel):
    config_class = KerpleConfig
    base_model_prefix = "gpt_neox"
    supports_gradient_checkpointing = True
    _no_split_modules = ["KerpleLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012
    _supports_sdpa = _supports_flex_attn = not hasattr(Method, "modify_scores")
    # Methods that are only tables over distance; others read positions.
    _can_compile_fullgraph = (
        not (hasattr(Method, "modify_scores") or hasattr(Method, "scale_qk"))
        and Method.embed is PositionalMethod.embed
        and Method.rotate is PositionalMethod.rotate
    )

    @classmethod
    def _can_set_attn_implementation(cls):
        return True

    def get_correct_attn_implementation(self, requested_attention, is_init_check=False):
        """The implementation for `attn_implementation`; None selects sdpa if the positional method
        allows it. Raises ValueError for one that cannot compute the method.
        """
        with torch.device("meta"):
            layers = range(self.config.num_hidden_layers)
            methods = [make_positional(self.config, layer) for layer in layers]
        mode = inference_mode(self.config, methods)
        supported = implementations(Requirements.of(*methods), mode)
        if requested_attention is None:
            if "sdpa" in supported:
                return "sdpa"
            return "eager"
        if requested_attention not in supported:
            method = str(self.config.positional_method)
            if mode is not None:
                method += f" in mode {self.config.inference_mode}"
            raise ValueError(
                f'Specified `attn_implementation="{requested_attention}"` is not supported with '
                f"the positional method {method}; choose from {', '.join(supported)}"
            )
        return requested_attention

    def _init_weights(self, module):
        super()._init_weights(module)
        # transformers 5.0 and 5.10, among others, also call this for loaded modules, whose tensors
        # have a mark.
        if isinstance(module, PositionalMethod):
            parameters = module.parameters()
            if not all(getattr(parameter, "_is_hf_initialized", False) for parameter in parameters):
                module.reset_parameters()


class KerpleModel(KerplePreTrainedModel):
    """Tokens to hidden states after the final norm. Parameters have the names of GPTNeoXModel's."""

    def __init__(self, config):
        super().__init__(config)
        self.embed_in = nn.Embedding(config.vocab_size, config.hidden_size)
        self.emb_dropout = nn.Dropout(config.hidden_dropout)
        self.positional = make_positional(config)
        if not is_shared(self.positional):
            self.positional = None
        layers = [KerpleLayer(config, index) for index in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.final_layer_norm = make_norm(config)
        self.mode = inference_mode(config, self.methods())
        self.gradient_checkpointing = False
        self.post_init()

    def methods(self):
        """The positional method that all layers share, or those of the layers."""
        if self.positional is not None:
            return [self.positional]
        return [layer.attention.positional for layer in self.layers]

    def new_cache(self, max_length=None):
        """An empty cache. max_length: of the text, if the inference mode depends on it."""
        if self.mode is None:
            return DynamicCache()
        span = self.mode.span
        return ModeCache(self.config.num_hidden_layers, span.window, span.sinks, max_length)

    def get_input_embeddings(self):
        return self.embed_in

    def set_input_embeddings(self, embeddings):
        self.embed_in = embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        cache=None,
        token_type_ids=None,
        **ignored,
    ):
        """Tokens `[b, s]` (or embeddings `[b, s, e]`) that follow those in the cache -> hidden
        states `[b, s, e]`.

        attention_mask: `[b, t]`, 0 for padding. position_ids: `[b, s]`, consecutive in each text;
        without attention_mask and cache, every jump starts another text of the row (packed
        sequences). cache: another name of past_key_values. token_type_ids: ignored; tokenizers
        return them. ignored: see `check_ignored`.
        """
        # Inputs.
        check_ignored(ignored, position_ids)
        config, cache = self.config, one_cache(cache, past_key_values)
        if output_attentions is None:
            output_attentions = config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hidden = inputs_embeds
        if hidden is None:
            hidden = self.embed_in(input_ids)

        # Positions, and whether a cache can continue them.
        shared = self.positional is not None
        methods = self.methods()
        check_loaded(methods[0], hidden.device)
        if self.mode is not None and output_attentions:
            raise ValueError("output_attentions is not supported in an inference mode")
        layout = Layout.of(methods, hidden, attention_mask, position_ids, cache, self.mode)
        if layout.uncacheable is not None and (use_cache or cache is not None):
            raise ValueError(layout.uncacheable)
        if use_cache is None:
            use_cache = config.use_cache and not self.training and layout.uncacheable is None
        if use_cache and cache is None:
            cache = self.new_cache()

        # Without a mode, all layers use the same tables of a shared method.
        hidden = self.emb_dropout(layout.embed(methods[0], hidden))
        tables = NO_TABLES
        if shared and self.mode is None:
            tables = tables_of(self.positional, layout.total, hidden.device)
        all_states, all_probabilities = [hidden], []

        # Early exit changes the number of layers in the configuration.
        for layer in self.layers[: config.num_hidden_layers]:
            hidden, probabilities = layer(
                hidden,
                tables.bias,
                tables.weight,
                tables.scores,
                shared=self.positional,
                layout=layout,
                layer_past=cache,
                output_attentions=output_attentions,
            )
            all_states.append(hidden)
            all_probabilities.append(probabilities)
        all_states[-1] = self.final_layer_norm(hidden)

        # Outputs that were asked for.
        outputs = {}
        if use_cache:
            outputs[CACHE_NAME] = cache
        if output_hidden_states:
            outputs["hidden_states"] = tuple(all_states)
        if output_attentions:
            outputs["attentions"] = tuple(all_probabilities)
        return BaseModelOutputWithPast(last_hidden_state=all_states[-1], **outputs)


class KerpleForCausalLM(KerplePreTrainedModel, GenerationMixin):
    """Tokens `[b, s]` to logits `[b, s, v]`.

    accepts_loss_kwargs: Trainer passes `num_items_in_batch`, and does not divide the loss by the
        accumulation steps.
    """

    accepts_loss_kwargs = True
    _tied_weights_keys = {"embed_out.weight": "gpt_neox.embed_in.weight"}  # noqa: RUF012

    def __init__(self, config):
        super().__init__(config)
        self.gpt_neox = KerpleModel(config)
        self.embed_out = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.embed_out

    def set_output_embeddings(self, embeddings):
        self.embed_out = embeddings

    def new_cache(self, max_length=None):
        """An empty cache. max_length: of the text, if the inference mode depends on it."""
        return self.gpt_neox.new_cache(max_length)

    def prepare_inputs_for_generation(self, *args, **kwargs):
        """With the cache under its older name, for which peft looks."""
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        if "cache" in inputs:
            inputs["past_key_values"] = inputs.pop("cache")
        return inputs

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        """In an inference mode, `generate` uses `new_cache` for the final length."""
        mode = self.gpt_neox.mode
        if mode is not None:
            if generation_config.cache_implementation not in (None, "dynamic"):
                raise ValueError(
                    f"cache_implementation {generation_config.cache_implementation!r} is not "
                    'supported in an inference mode; use "dynamic"'
                )
            if generation_config.use_cache is False and mode.length_dependent:
                raise ValueError(
                    f"inference mode {self.config.inference_mode} depends on the final length of "
                    "the text, which is unknown without a cache; use use_cache=True"
                )
            if generation_config.use_cache is not False and model_kwargs.get(CACHE_NAME) is None:
                model_kwargs[CACHE_NAME] = self.new_cache(max_cache_length + 1)
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )

    @staticmethod
    def create_masks_for_generate(attention_mask, cache=None, past_key_values=None, **kwargs):
        """For a static cache: the mask `[b, t]` with t as constant as the cache. The other
        arguments are those of other models' masks. A cache under another name is left to `forward`,
        which rejects it.
        """
        cache = one_cache(cache, past_key_values)
        if attention_mask is None or cache is None:
            return attention_mask
        return F.pad(attention_mask, (0, cache.layers[0].max_cache_len - attention_mask.shape[1]))

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        logits_to_keep=0,
        cache=None,
        token_type_ids=None,
        num_items_in_batch=None,
        **ignored,
    ):
        """Like KerpleModel. labels: `[b, s]`, compared with the prediction at the previous token;
        -100 is ignored. logits_to_keep: compute logits for the last N positions (0: all), or for
        these ones. num_items_in_batch: divide the sum of the losses by this number; default: by the
        number of labels.
        """
        outputs = self.gpt_neox(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=one_cache(cache, past_key_values),
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            **ignored,
        )
        if isinstance(logits_to_keep, int):
            logits_to_keep = slice(-logits_to_keep, None)
        logits = self.embed_out(outputs.last_hidden_state[:, logits_to_keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{CACHE_NAME: getattr(outputs, CACHE_NAME)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


# Trainer's label smoothing shifts the labels, and the text-generation pipeline accepts models, by
# these names.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(KerpleConfig.model_type, KerpleForCausalLM.__name__)


class KerpleForSequenceClassification(GenericForSequenceClassification, KerplePreTrainedModel):
    """The class of each row `[b, num_labels]`, from the hidden state of its last token that is not
    padding.

    accepts_loss_kwargs: Trainer divides the loss, the mean over the rows of a micro-batch, by the
        accumulation steps.
    """

    base_model_prefix = "gpt_neox"
    accepts_loss_kwargs = False

    def __init__(self, config):
        KerplePreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.gpt_neox = KerpleModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()
