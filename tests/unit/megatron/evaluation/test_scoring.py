"""The loss of each token, in chunks through the cache, against a direct float64 computation."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kerple.attention import FULL, Span
from kerple.positional import primary_names
from megatron.evaluation.protocols import Segments, plan
from megatron.evaluation.scoring import score
from megatron.inference.decoder import as_decoder
from tests.support.language_models import VOCABULARY, AlibiByHand, direct_losses, random_tokens, small_gpt

STREAM = random_tokens(400)


def losses_of(model, segments: Segments, *, span=FULL, query_chunk=16, batch_tokens=128) -> torch.Tensor:
    """`[segments, scored positions]`, put together from what `score` gives."""
    found = torch.full((len(segments.starts), segments.length), torch.nan, dtype=torch.float64)
    with torch.inference_mode():
        for part in score(
            as_decoder(model),
            STREAM,
            segments,
            span=span,
            query_chunk=query_chunk,
            batch_tokens=batch_tokens,
            device=torch.device("cpu"),
        ):
            rows, columns = part.losses.shape
            found[part.segment : part.segment + rows, part.position : part.position + columns] = part.losses.double()
    return found[:, segments.first :]


def direct(model, segments: Segments, **span) -> torch.Tensor:
    """The same by one call over each whole segment, in float64."""
    rows = [STREAM[start : start + segments.length + 1] for start in segments.starts]
    text = torch.stack(rows)
    with torch.no_grad():
        logits = model(text[:, :-1], **span)
    return direct_losses(logits, text[:, 1:])[:, segments.first :]


@pytest.mark.parametrize("sizes", [{}, *({"window": size} for size in (1, 5, 24, 500)), {"block": 8}])
def test_callable_equals_the_definition(sizes):
    model = AlibiByHand()
    segments = plan("non-overlapping", len(STREAM), [40], None)[0]
    torch.testing.assert_close(
        losses_of(model, segments, span=Span(**sizes)), direct(model, segments, **sizes), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("span", [FULL, Span(window=1), Span(window=5), Span(window=24), Span(block=12)])
@pytest.mark.parametrize("method", primary_names())
def test_chunks_equal_the_whole_for_every_method(method, span):
    """50 tokens in chunks of 16, three segments at once and one left over, float32 against float64 at once."""
    model = small_gpt(method)
    segments = Segments(50, range(0, 350, 50))
    chunked = losses_of(model, segments, span=span, batch_tokens=150)
    whole = direct(copy.deepcopy(model).double(), segments, span=span)
    torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-5)
    assert whole.std() > 0.5  # the model is no constant that anything would agree with


def test_window_reaches_as_far_as_it_says():
    """In one layer a window of W sees exactly W keys: the token W - 1 back matters, the one before it does not."""
    model = small_gpt("kerple_log", num_layers=1)
    segments = Segments(32, [0])
    before = losses_of(model, segments, span=Span(window=8))[0]
    changed = STREAM.clone()
    changed[10] = (changed[10] + 1) % VOCABULARY
    text = changed[:33]
    with torch.no_grad():
        after = direct_losses(copy.deepcopy(model).double()(text[None, :-1], span=Span(window=8)), text[None, 1:])[0]
    moved = ((after - before).abs() > 1e-4).nonzero().flatten().tolist()
    assert moved == list(range(9, 18))  # position 9 predicts the changed token, 10 ... 17 can see it


def test_blocks_are_counted_from_the_segment_s_beginning():
    """In one layer, blocks of 8: tokens 8 ... 15 matter to the queries of their own block and the next."""
    model = small_gpt("kerple_log", num_layers=1)
    segments = Segments(40, [0])
    before = losses_of(model, segments, span=Span(block=8), query_chunk=5)[0]
    changed = STREAM.clone()
    changed[10] = (changed[10] + 1) % VOCABULARY
    text = changed[:41]
    with torch.no_grad():
        after = direct_losses(copy.deepcopy(model).double()(text[None, :-1], span=Span(block=8)), text[None, 1:])[0]
    assert ((after - before).abs() > 1e-4).nonzero().flatten().tolist() == list(range(9, 24))


@pytest.mark.parametrize("batch_tokens", [1, 64, 129, 10_000])
@pytest.mark.parametrize("query_chunk", [1, 7, 64])
def test_batches_and_chunks_change_nothing(batch_tokens, query_chunk):
    model = small_gpt("alibi").double()
    segments = Segments(32, range(0, 320, 32))
    expected = direct(model, segments)
    found = losses_of(model, segments, query_chunk=query_chunk, batch_tokens=batch_tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("first", [3, 16, 40])
def test_only_positions_from_first_on_are_scored(first):
    model = small_gpt("rotary").double()
    segments = Segments(48, range(0, 240, 48), first=first)
    found = losses_of(model, segments)
    assert found.shape == (5, 48 - first)
    torch.testing.assert_close(found, direct(model, segments), rtol=0, atol=1e-10)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any result had."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


@pytest.mark.parametrize("method", ["kerple_log", "rpe", "rotary"])
def test_memory_grows_linearly_with_the_length(method):
    """No tensor is length x length or length x vocabulary: the largest one is heads x chunk x length."""
    model = small_gpt(method, padded_vocab_size=5000)
    stream = torch.randint(0, 5000, (2049,))

    def largest(length: int) -> int:
        with torch.inference_mode(), LargestTensor() as seen:
            for _ in score(
                as_decoder(model),
                stream,
                Segments(length, [0]),
                span=FULL,
                query_chunk=32,
                batch_tokens=1,
                device=torch.device("cpu"),
            ):
                pass
        return seen.elements

    assert largest(2048) <= 4 * 32 * 2048
    assert largest(2048) <= 2 * largest(1024)
