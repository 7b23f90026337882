"""The loss of each token, in chunks through the KV cache, compared with a direct float64
computation.
"""

import copy

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kerple.attention import DEFAULT_MODE, AttentionMode, Span
from kerple.positional import primary_names
from kerple.positional.distance_maps import Clip
from megatron.evaluation.protocols import Segments
from megatron.evaluation.scoring import LossAccumulator, LossChunk, SegmentReader
from megatron.evaluation.text import Text
from megatron.inference.decoder import as_decoder
from tests.support.attention import LargestStorage
from tests.support.language_models import (
    VOCABULARY,
    AlibiByHand,
    direct_losses,
    random_tokens,
    small_gpt,
)

STREAM = random_tokens(400)


def reader_of(model, query_chunk=16, batch_tokens=128) -> SegmentReader:
    return SegmentReader(as_decoder(model), torch.device("cpu"), query_chunk, batch_tokens)


def losses_of(model, segments: Segments, *, mode=DEFAULT_MODE, **sizes) -> torch.Tensor:
    """`[segments, scored positions]`, assembled from the chunks."""
    losses = torch.full((len(segments.starts), segments.length), torch.nan, dtype=torch.float64)
    with torch.inference_mode():
        for chunk in reader_of(model, **sizes).losses(STREAM, segments, mode):
            rows, columns = chunk.losses.shape
            losses[
                chunk.segment : chunk.segment + rows, chunk.position : chunk.position + columns
            ] = chunk.losses
    return losses[:, segments.first :]


def direct(model, segments: Segments, **span) -> torch.Tensor:
    """The same, from one call over all segments, in float64."""
    text = torch.stack([STREAM[start : start + segments.length + 1] for start in segments.starts])
    with torch.no_grad():
        logits = model(text[:, :-1], **span)
    return direct_losses(logits, text[:, 1:])[:, segments.first :]


@pytest.mark.parametrize("sizes", [{}, {"window": 5}, {"block": 8}])
def test_a_callable_without_a_cache(sizes):
    model = AlibiByHand()
    segments = Segments(40, range(0, 360, 40))
    losses = losses_of(model, segments, mode=AttentionMode(Span(**sizes)))
    torch.testing.assert_close(losses, direct(model, segments, **sizes), rtol=0, atol=1e-12)


SPANS = (Span(window=1), Span(window=24), Span(block=12))


@pytest.mark.parametrize(
    ("method", "span"),
    [
        *((method, Span(window=5)) for method in primary_names()),
        *(("kerple_log", s) for s in SPANS),
    ],
)
def test_chunks_equal_one_call_for_every_method(method, span):
    """50 tokens in chunks of 16, batches of three segments and one of the rest, float32 compared
    with float64.
    """
    model = small_gpt(method)
    segments = Segments(50, range(0, 350, 50))
    chunked = losses_of(model, segments, mode=AttentionMode(span), batch_tokens=150)
    expected = direct(copy.deepcopy(model).double(), segments, mode=AttentionMode(span))
    torch.testing.assert_close(chunked, expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.5  # the model is not a constant


def changed_losses(span: Span, **sizes) -> list[int]:
    """Positions of a one-layer model whose loss changes with token 10."""
    model = small_gpt("kerple_log", num_layers=1)
    before = losses_of(model, Segments(40, [0]), mode=AttentionMode(span), **sizes)[0]
    text = STREAM[:41].clone()
    text[10] = (text[10] + 1) % VOCABULARY
    with torch.no_grad():
        after = direct_losses(
            copy.deepcopy(model).double()(text[None, :-1], mode=AttentionMode(span)), text[None, 1:]
        )[0]
    return ((after - before).abs() > 1e-4).nonzero().flatten().tolist()


@pytest.mark.parametrize("pos_emb", ["alibi", "rotary", "sinusoidal"])
def test_random_positions_are_those_of_a_text_of_the_length(pos_emb):
    """As in the authors' evaluation, also for segments that are read in chunks."""
    options = {"random_range": 100, "random_length": 64}
    model = small_gpt(pos_emb, pos_emb_options=options)
    for length in (10, 40):
        segments = Segments(length, [0, 50])
        expected = small_gpt(pos_emb, pos_emb_options={**options, "random_length": length})
        expected.load_state_dict(model.state_dict())
        torch.testing.assert_close(
            losses_of(model, segments), direct(expected, segments), rtol=0, atol=1e-5
        )


def test_a_window_has_exactly_its_number_of_keys():
    # Position 9 predicts the changed token; positions 10 to 17 attend to it.
    assert changed_losses(Span(window=8)) == list(range(9, 18))


def test_blocks_start_at_the_segment_s_start():
    # Tokens 8 to 15 are a block, which queries of this block and the next attend to.
    assert changed_losses(Span(block=8), query_chunk=5) == list(range(9, 24))


@pytest.mark.parametrize(
    ("first", "query_chunk", "batch_tokens"),
    [(0, 1, 10_000), (0, 7, 129), (0, 64, 1), (3, 16, 128), (40, 16, 128)],
)
def test_sizes_do_not_change_losses_and_positions_before_first_are_not_scored(
    first, query_chunk, batch_tokens
):
    model = small_gpt("rotary").double()
    segments = Segments(48, range(0, 240, 48), first)
    losses = losses_of(model, segments, query_chunk=query_chunk, batch_tokens=batch_tokens)
    torch.testing.assert_close(losses, direct(model, segments), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("method", "mode"),
    [("kerple_log", DEFAULT_MODE), ("rotary", AttentionMode(distance_map=Clip(32)))],
)
def test_memory_grows_linearly_with_the_length(method, mode):
    """No tensor is length x length or length x vocabulary: the largest one is heads x chunk x
    length.
    """
    model = small_gpt(method, padded_vocab_size=512)
    stream = random_tokens(513)

    def largest(length: int) -> int:
        with torch.inference_mode(), LargestStorage() as tensors:
            for _ in reader_of(model, query_chunk=32, batch_tokens=1).losses(
                stream, Segments(length, [0]), mode
            ):
                pass
        return tensors.elements

    elements = largest(512)
    assert elements <= 4 * 32 * 512
    assert elements <= 2 * largest(256)


def test_the_cost_of_sinks_does_not_grow_with_the_length():
    model, mode = small_gpt("rotary"), AttentionMode(Span(window=16, sinks=4))
    stream, operations = random_tokens(257), []
    for length in (128, 256):
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            list(reader_of(model, query_chunk=50).losses(stream, Segments(length, [0]), mode))
        operations.append(counter.get_total_flops())
    assert operations[1] <= 2.1 * operations[0]


@pytest.mark.parametrize("documents", [256, 1000])
def test_groups_of_documents(documents):
    """At most 256 groups of consecutive documents, with about equal numbers of tokens and the same
    total loss.
    """
    lengths = np.random.default_rng(0).integers(5, 50, documents)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    text = Text(torch.zeros(int(offsets[-1]), dtype=torch.int64), offsets)
    segments = Segments(int(offsets[-1]) - 1, [0])
    sums = LossAccumulator(text, segments)
    losses = torch.rand(1, segments.length, dtype=torch.float64)
    sums.add(LossChunk(0, 0, losses))
    groups = sums.groups()
    tokens, means = np.array(groups["tokens"]), np.array(groups["losses"])
    assert len(tokens) == len(means) == min(documents, 256)
    assert tokens.sum() == segments.length
    assert tokens @ means == pytest.approx(float(losses.sum()), rel=1e-6)
    if documents == 1000:
        assert tokens.max() < 2 * tokens.mean()
    else:
        assert tokens.tolist() == [int(lengths[0]) - 1, *lengths[1:].tolist()]


def test_chunks_without_scored_tokens_are_left_out():
    chunks = reader_of(small_gpt("alibi")).losses(STREAM, Segments(48, [0], first=32))
    assert [(chunk.position, tuple(chunk.losses.shape)) for chunk in chunks] == [(32, (1, 16))]


@pytest.mark.parametrize(("start", "documents"), [(2, 2), (3, 1), (7, 1), (8, 2)])
def test_documents_are_those_of_the_scored_tokens(start, documents):
    """The first token of a segment is only context. With a single document, the segments count."""
    text = Text(torch.zeros(16, dtype=torch.int64), np.array([0, 4, 12, 16]))
    sums = LossAccumulator(text, Segments(4, [start]))
    sums.add(LossChunk(0, 0, torch.ones(1, 4)))
    assert sums.documents == documents
    assert len(sums.losses) == (1 if documents == 1 else 3)
