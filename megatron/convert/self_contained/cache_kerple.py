"""The cache of keys and values in inference modes.

Legend: b batch, s new tokens, t all tokens (cached and new), g heads of keys and values, d head size.
"""

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class ModeCache(DynamicCache):
    """Keys are cached before rotation. With a window, memory does not depend on the length of the text."""

    def __init__(self, num_layers, window=None, sinks=0, max_length=None):
        """window, sinks: keys that later queries attend to, of the last and the first tokens; without a window, all.
        max_length: of the text, on which the modes `linear` and `dynamic-ntk` depend.
        """
        super().__init__()
        self.max_length = max_length
        if window is not None:
            self.layers = [BoundedLayer(window, sinks) for _ in range(num_layers)]
            self.layer_class_to_replicate = None


class BoundedLayer(DynamicLayer):
    """Keys and values of the first `sinks` and the last window - 1 tokens of each row (at least one), including
    padding.
    """

    is_croppable = False

    def __init__(self, window, sinks):
        super().__init__()
        self.sinks, self.recent = sinks, max(1, window - 1)
        self.cumulative_length = 0  # including dropped tokens

    def update(self, key_states, value_states, *args, **kwargs):
        """Append `[b, g, s, d]`; return these and the kept ones."""
        keys, values = super().update(key_states, value_states)
        self.cumulative_length += key_states.shape[2]
        if keys.shape[2] > self.sinks + self.recent:
            parts = slice(self.sinks), slice(-self.recent, None)
            self.keys, self.values = (torch.cat([states[:, :, part] for part in parts], 2) for states in (keys, values))
        return keys, values

    def kept(self, ids, positions, sinks):
        """The document ids and positions of the tokens whose keys `update` returns next, of all tokens `[b, t]`.
        Tokens before the window are padding, except for the first `sinks` of each text.
        """
        stored = self.keys.shape[2] if self.is_initialized else 0
        columns, dropped = torch.arange(ids.shape[1], device=ids.device), self.cumulative_length - stored
        if not dropped:
            return ids, positions
        columns = torch.cat((columns[: self.sinks], columns[self.sinks + dropped :]))
        ids, positions = ids[:, columns], positions[:, columns]
        return ids.masked_fill((columns < self.sinks) & (positions >= sinks), -1), positions

    def get_seq_length(self):
        return self.cumulative_length

    def crop(self, *_):
        raise ValueError(
            "the cache of an inference mode with a window cannot be cropped; assisted decoding and prompt lookup need "
            "a mode without one"
        )

    activate_past_recording = crop
