"""The precision that attention is computed in: that of its inputs for the states, float32 at least in between."""

import contextlib

import torch


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Autocast would take the matrix products of scores back to half precision."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
