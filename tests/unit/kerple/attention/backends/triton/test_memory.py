"""The loads of the kernels: which tokens the programs read for documents; `test_kernels.py` covers
the others.
"""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from kerple.attention import Documents
from kerple.attention.backends.triton.launch import document_tiles
from kerple.attention.backends.triton.memory import load_document_tile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def places_kernel(documents, output, BLOCK: tl.constexpr):
    """Per program: sample, first token of the document, its length, its place, position of the
    tile.
    """
    sample, origin, length, place, first = load_document_tile(documents, tl.program_id(0), BLOCK)
    output += 5 * tl.program_id(0)
    tl.store(output, sample)
    tl.store(output + 1, origin)
    tl.store(output + 2, length)
    tl.store(output + 3, place)
    tl.store(output + 4, first)


@pytest.mark.parametrize("block", [32, 64, 128])
def test_tiles_cover_each_token_of_each_document_once(block):
    ids = torch.tensor([[0] * 300 + [1] * 40, [3] * 128 + [-1] * 12 + [4] * 200], device=DEVICE)
    tiles, counts, tokens = document_tiles(Documents(ids))
    output = torch.zeros(len(tiles) * 128 // block, 5, dtype=torch.int64, device=DEVICE)
    places_kernel[(len(output),)](tiles, output, BLOCK=block)

    seen = torch.zeros_like(ids)
    for sample, origin, length, place, first in output.tolist():
        for position in range(first, min(first + block, length)):
            seen[sample, origin + position] += 1
            assert tokens[place + position] == sample * ids.shape[1] + origin + position
    assert torch.equal(seen, (ids >= 0).long())
    positions = tiles[:, 4].tolist()
    assert positions == sorted(positions, reverse=True)
    assert counts.tolist() == [
        sum(position >= 128 * index for position in positions) for index in range(3)
    ]
