"""Context utilization, compared with the losses of the cut texts one by one in float64."""

import math

import numpy as np
import pytest
import torch

from megatron.evaluation.metrics.context import TARGETS, plan_context
from megatron.evaluation.protocols import Segments
from megatron.evaluation.records import Provenance
from megatron.evaluation.runner import EvalContext, run_eval_tasks
from megatron.evaluation.scoring import SegmentReader
from megatron.evaluation.text import Text
from megatron.inference.decoder import as_decoder
from megatron.utils.errors import UserError
from tests.support.language_models import AlibiByHand, direct_losses, random_tokens, small_gpt

STREAM = random_tokens(1000)
DOCUMENTS = np.array([0, 155, 300, 340])


def measure(model, text, lengths, texts=99, modes=("full",), **options):
    tasks = plan_context(text, lengths, modes, texts, Provenance())
    return tasks, run_eval_tasks(model, tasks, progress=False, **options)


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_differences_are_those_of_the_same_tokens(documents):
    model, length = AlibiByHand(), 160
    _, (record,) = measure(model, Text(STREAM[:340], documents), [length])
    starts = range(0, 320, length)
    assert record["contexts"] == [64, 128]
    assert record["tokens"] == len(starts) * TARGETS
    scored = Segments(TARGETS, [start + length - TARGETS for start in starts])
    assert record["targets"] == Text(STREAM[:340], documents).targets_digest(scored)
    full, shorter = {}, {64: {}, 128: {}}
    targets = torch.tensor(starts)[:, None] + torch.arange(length - TARGETS + 1, length + 1)
    # All targets of a text are read from one start, so the later ones have more context.
    for losses, before in ((full, length), *((shorter[size], size + TARGETS - 1) for size in shorter)):
        text = torch.stack([STREAM[start + length - before : start + length] for start in starts])
        values = direct_losses(model(text)[:, -TARGETS:], STREAM[targets])
        losses |= zip(targets.flatten().tolist(), values.flatten().tolist(), strict=True)
    assert record["loss"] == pytest.approx(np.mean(list(full.values())), rel=1e-9)
    for size, difference, error in zip(record["contexts"], record["differences"], record["stderrs"], strict=True):
        differences = {target: loss - full[target] for target, loss in shorter[size].items()}
        assert difference == pytest.approx(np.mean(list(differences.values())), abs=1e-12)
        groups: dict[int, list[float]] = {}
        for target, value in differences.items():
            group = (target - 1) // length if documents is None else int(np.searchsorted(documents, target, "right"))
            groups.setdefault(group, []).append(value)
        residuals = [sum(values) - difference * len(values) for values in groups.values()]
        count = len(groups)
        expected = math.sqrt(count / (count - 1) * sum(r * r for r in residuals)) / len(differences)
        assert error == pytest.approx(expected, rel=1e-6)


def test_tokens_before_a_cut_text_do_not_matter():
    """A text that begins 64 tokens before a target passes no information on from earlier ones through lower layers."""
    model = small_gpt("alibi").double()
    first = STREAM[:400].clone()
    changed = first.clone()
    changed[:150] = (changed[:150] + 1) % 61
    text, other = Text(first[:241]), Text(changed[:241])
    _, (record,) = measure(model, text, [240])
    _, (again,) = measure(model, other, [240])
    losses = [values["loss"] + values["differences"][0] for values in (record, again)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)  # 79 tokens are read, none of which changed
    assert abs(record["loss"] - again["loss"]) > 1e-6
    assert measure(model, text, [240], query_chunk=7)[1][0]["differences"] == pytest.approx(record["differences"])


def test_plans():
    text = Text(STREAM)
    tasks = plan_context(text, [160, 100], ["full", "window@64"], 2, Provenance())
    assert [(task.mode.name, task.segments.length, task.contexts) for task in tasks] == [
        (mode, length, contexts)
        for mode in ("full", "window@64")
        for length, contexts in ((160, (64, 128)), (100, (64,)))
    ]
    assert [len(task.segments.starts) for task in tasks] == [2] * 4
    rows = plan_context(Text(STREAM, row=200), [160], ["full"], 99, Provenance())
    assert list(rows[0].segments.starts) == [0, 200, 400, 600, 800]
    assert [list(part.starts) for part in rows[0].parts] == [
        [200 * row + skip for row in range(5)] for skip in (81, 17)
    ]
    assert rows[0].planned[0]["protocol"] == "last-k@16 by document"
    with pytest.raises(UserError, match=r"--context-utilization.*79.*--lengths.*80"):
        plan_context(text, [79], ["full"], 2, Provenance())
    with pytest.raises(UserError, match="2,000"):
        plan_context(text, [2000], ["full"], 2, Provenance())


def test_positions_that_a_model_does_not_have():
    _, (short, long) = measure(small_gpt("learned", max_positions=128), Text(STREAM), [100, 160])
    assert short["note"] is None
    assert len(short["differences"]) == 1
    assert "128" in long["note"]
    assert (long["loss"], long["contexts"], long["differences"], long["stderrs"]) == (None, [], [], [])


def test_progress_counts_all_tokens():
    (task,) = plan_context(Text(STREAM), [160], ["full"], 99, Provenance())
    advanced: list[int] = []
    model = small_gpt("alibi")
    reader = SegmentReader(as_decoder(model), torch.device("cpu"), 32, 400)
    with torch.no_grad():
        task.run(EvalContext(model, reader, 0, 1), task.segments, advanced.append)
    assert task.segments.targets - 1 <= sum(advanced) <= task.segments.targets
    assert min(advanced) >= 0
