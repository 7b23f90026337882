"""The cache of keys and values in inference modes.

Legend: b batch, s new tokens, g heads of keys and values, d head size.
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
    """Keys and values of the first `sinks` tokens of each text and of the last window - 1 tokens (at least one).

    Until tokens are dropped, `keys` has one column for each token. Afterwards, it has the sinks of each row, which can
    be different tokens if rows begin with padding, and then the last tokens.
    """

    is_croppable = False

    def __init__(self, window, sinks):
        super().__init__()
        self.sinks, self.recent = sinks, max(1, window - 1)
        self.cumulative_length = 0  # including dropped tokens

    @property
    def first(self):
        """The index of the first token after the sinks; 0 if no token has been dropped."""
        dropped = self.cumulative_length > self.sinks + self.recent
        return self.cumulative_length - self.recent if dropped else 0

    def update(self, key_states, value_states, places=None, **kwargs):
        """Append `[b, g, s, d]`; return these and all keys and values before them, as described above. places: `starts`
        is the number of padding tokens before each text, int64 `[b]`, or None.
        """
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
            self.is_initialized = True
        keys, values = torch.cat((self.keys, key_states), dim=2), torch.cat((self.values, value_states), dim=2)
        first = self.first
        self.cumulative_length += key_states.shape[2]
        self.keys, self.values = keys, values
        if self.first:
            starts = None if places is None else places.get("starts")
            starts = torch.zeros(1, dtype=torch.int64, device="cpu") if starts is None else starts
            starts = starts.to(keys.device)[:, None]
            # The tokens to keep, and where they are. Those that do not exist yet are replaced later.
            sinks = starts + torch.arange(self.sinks, device=keys.device)
            sinks = torch.where(sinks < first, sinks - starts, sinks - first + (self.sinks if first else 0))
            last = torch.arange(keys.shape[2] - self.recent, keys.shape[2], device=keys.device)
            index = torch.cat((sinks.clamp(max=keys.shape[2] - 1), last.expand(len(starts), -1)), dim=1)
            index = index[:, None, :, None].expand(len(keys), keys.shape[1], -1, keys.shape[3])
            self.keys, self.values = keys.gather(2, index), values.gather(2, index)
        return keys, values

    def get_seq_length(self):
        return self.cumulative_length

    def crop(self, *_):
        raise ValueError(
            "the cache of an inference mode with a window cannot be cropped; assisted decoding and prompt lookup need "
            "a mode without one"
        )

    activate_past_recording = crop
