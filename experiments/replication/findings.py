"""Sentences about the claims of the papers: how many hold, which ones, and the direction of the others."""

from collections.abc import Iterable, Sequence
from typing import get_args

from experiments.replication.claims import Result, Verdict, has_several_runs
from experiments.replication.training_length import LOG
from megatron.reporting.aggregate import Method
from megatron.reporting.published import display_name


def verdict_summary(results: Sequence[Result]) -> str:
    """How many claims have which verdict."""
    verdicts = [result.verdict for result in results]
    count = {verdict: verdicts.count(verdict) for verdict in get_args(Verdict)}
    if count["not measured"] == len(results):
        return "No claim of the papers has been measured yet."
    if count["one seed"] and not has_several_runs(results):
        return "The claims of the papers are not decided yet, because there is only one seed."
    texts = {
        "holds": ("holds", "hold"),
        "does not hold": ("does not hold", "do not hold"),
        "inconclusive": ("is inconclusive", "are inconclusive"),
        "one seed": ("has only one seed", "have only one seed"),
        "not measured": ("is not measured yet", "are not measured yet"),
    }
    counts = [f"{number} {texts[verdict][number > 1]}" for verdict, number in count.items() if number]
    return f"Of {len(results)} claims of the papers, {', '.join(counts)}."


def decided_claims(results: Sequence[Result]) -> dict[str, list[str]]:
    """The claims that hold and those that do not, by verdict."""
    return {
        verdict: [result.claim.text for result in results if result.verdict == verdict]
        for verdict in ("holds", "does not hold")
    }


def comparisons_of_log(results: Iterable[Result]) -> list[str]:
    """In how many pairs of runs the log kernel has a lower loss than each other method beyond the training length, and
    than with a window. Without a sentence for what was not measured.
    """
    others, windows = [], []
    for claim, estimate in ((result.claim, result.estimate) for result in results):
        if claim.kind != "loss" or claim.first.method != LOG or estimate is None:
            continue
        lengths, second = claim.first.at, claim.second.method
        count = f"in {sum(difference < 0 for difference in estimate.by_run)} of {len(estimate.by_run)}"
        if second == Method(LOG.pos_emb, "window"):
            windows.append(f"{count} at {lengths[0]} times")
        elif second.pos_emb != LOG.pos_emb and len(lengths) > 1:
            others.append(f"than {display_name(second)} {count} ({lengths[0]} to {lengths[-1]} times)")
    sentences = []
    if others:
        sentences.append(
            f"Pairs of runs in which KERPLE (log) has the lower loss beyond the training length: {', '.join(others)}."
        )
    if windows:
        sentences.append(
            "Runs in which KERPLE (log) has a lower loss with all keys than with a window of the training length: "
            f"{', '.join(windows)}."
        )
    return sentences
