"""Checkpoints of two small files."""

import torch

from megatron.checkpoint.cleanup import clean_up, publish, remove_older
from megatron.checkpoint.directory import tag_for
from megatron.checkpoint.manifest import write_manifest
from megatron.checkpoint.saving import write_files
from megatron.checkpoint.storage import load_tensors


def save(directory, iteration, value=None, keep=None):
    """Save a checkpoint of two files, with the steps of megatron.checkpoint.saving."""
    directory.mkdir(exist_ok=True)
    clean_up(directory)
    unfinished = directory / f"{tag_for(iteration)}.unfinished"
    unfinished.mkdir()
    weights = {"w": torch.full((1000,), float(iteration if value is None else value))}
    records, failure = write_files(
        unfinished, [("weights.pt", weights), ("configs/config.yml", b"{}\n")]
    )
    assert failure is None
    write_manifest(unfinished, iteration, records)
    publish(directory, unfinished, tag_for(iteration))
    if keep is not None:
        list(remove_older(directory, keep, range(iteration + 1)))


def value_of(step):
    return load_tensors(step / "weights.pt")["w"][0].item()


def flip_bit(path):
    """Flip one bit in the middle, as a failing disk does; the size does not change."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
