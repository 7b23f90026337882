"""The cache of keys and values in inference modes, which are cached before rotation.

Legend: b batch, s new tokens, t all tokens (cached and new), g heads of keys and values, d head
size.
"""

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class ModeCache(DynamicCache):
    """With a window, memory does not depend on the length of the text."""

    def __init__(self, num_layers, window=None, sinks=0, max_length=None):
        """window, sinks: keys that later queries attend to, of the last and the first tokens;
        without a window, all. max_length: of the text, on which the modes `linear` and
        `dynamic-ntk` depend.
        """
        super().__init__()
        self.sinks, self.max_length = sinks, max_length
        if window is not None:
            self.layers = [BoundedLayer(window, sinks) for _ in range(num_layers)]
            self.layer_class_to_replicate = None

    def kept(self, ids, positions):
        """The document ids and positions of the keys that `update` returns next, of those of all
        tokens `[b, t]`. Tokens before the window are padding, except for the sinks of each text.
        """
        if not isinstance(next(iter(self.layers), None), BoundedLayer):
            return ids, positions
        # The sinks of all texts are in the first columns, which are kept.
        is_text, columns = ids >= 0, torch.arange(ids.shape[1], device=ids.device)
        begin = torch.where(is_text.any(dim=1), is_text.long().argmax(dim=1), ids.shape[1]).max()
        first = self.sinks and self.sinks + int(begin)
        for layer in self.layers:
            layer.first = first
        if self.layers[0].dropped:
            columns = torch.cat((columns[:first], columns[first + self.layers[0].dropped :]))
            ids, positions = ids[:, columns], positions[:, columns]
            ids = ids.masked_fill((columns < first) & (positions >= self.sinks), -1)
        return ids, positions


class BoundedLayer(DynamicLayer):
    """Keys and values of the `first` and the last window - 1 tokens (at least one) of each row,
    including padding.
    """

    is_croppable = False

    def __init__(self, window, first):
        super().__init__()
        self.first, self.last = first, max(1, window - 1)
        self.cumulative_length = 0  # including dropped tokens

    @property
    def dropped(self):
        if not self.is_initialized:
            return 0
        return self.cumulative_length - self.keys.shape[2]

    def update(self, key_states, value_states, cache_kwargs=None):
        """Append `[b, g, s, d]`; return these and the kept ones. cache_kwargs: places in a static
        cache, not used.
        """
        keys, values = super().update(key_states, value_states)
        self.cumulative_length += key_states.shape[2]
        if keys.shape[2] > self.first + self.last:
            self.keys = torch.cat((keys[:, :, : self.first], keys[:, :, -self.last :]), dim=2)
            self.values = torch.cat((values[:, :, : self.first], values[:, :, -self.last :]), dim=2)
        return keys, values

    def get_seq_length(self):
        return self.cumulative_length

    def crop(self, *_):
        raise ValueError(
            "the cache of an inference mode with a window cannot be cropped; assisted decoding and "
            "prompt lookup need a mode without one"
        )

    activate_past_recording = crop
