"""The facts that the pages in docs/results state about the records of the replication."""

from collections import Counter
from collections.abc import Iterable, Sequence

from experiments.replication.claims import PROTOCOL
from experiments.replication.training_length import LOG
from megatron.reporting.aggregate import AnyRecord, Method, Setting, method_of, setting_of
from megatron.reporting.published import corpus_name, corpus_rank, display_name, published
from megatron.reporting.tables import escape_markdown
from megatron.utils.errors import UserError

CORPUS_TEXTS = {
    "debian_c": "C source code of the Linux kernel (in place of GitHub)",
    "debian_prose": "English prose from Debian and npm packages (in place of OpenWebText2)",
    "debian_latex": "LaTeX files from Debian packages (in place of ArXiv)",
}


def settings_of(records: Iterable[AnyRecord]) -> list[Setting]:
    """The settings of the losses, one per corpus, in the order of the papers' corpora."""
    settings = (setting_of(record) for record in records if record["kind"] == "extrapolation")
    return sorted(dict.fromkeys(setting for setting in settings if setting.protocol == PROTOCOL), key=rank)


def check_comparable(records: Iterable[AnyRecord]) -> None:
    """Raises UserError if losses on one corpus are those of several settings or numbers of training steps."""
    first: dict[str | None, AnyRecord] = {}
    for record in records:
        if record["kind"] != "extrapolation" or record["protocol"] != PROTOCOL:
            continue
        other = first.setdefault(record["corpus"], record)
        if setting_of(record) != setting_of(other):
            problem = "have different models or training lengths"
        elif (record["checkpoint"] or {}).get("iteration") != (other["checkpoint"] or {}).get("iteration"):
            problem = "have different numbers of training steps"
        else:
            continue
        raise UserError(
            f"{record['corpus']}: {_source(other)} and {_source(record)} {problem}, so their losses are not "
            "comparable; keep the records of one of them in experiments/replication/records"
        )


def _source(record: AnyRecord) -> str:
    setting, checkpoint = setting_of(record), record["checkpoint"] or {}
    return (
        f"{method_of(record).pos_emb} with seed {record['seed']} ({checkpoint.get('path')} at iteration "
        f"{checkpoint.get('iteration')}, {setting.size or 'unknown size'}, trained at length {setting.train_length})"
    )


def setting_facts(records: Sequence[AnyRecord]) -> list[dict[str, object]]:
    """For each corpus, the facts that the page states."""
    facts = []
    for setting in settings_of(records):
        own = [record for record in records if record["kind"] == "extrapolation" and setting_of(record) == setting]
        errors = [record["stderr"] or 0.0 for record in own if method_of(record) == LOG]
        facts.append(
            {
                "corpus": corpus_name(setting.corpus),
                "text": CORPUS_TEXTS.get(setting.corpus or "", corpus_name(setting.corpus)),
                "train_length": setting.train_length,
                "model": setting.model,
                "steps": (own[0]["checkpoint"] or {}).get("iteration") or 0,
                "seeds": _range(
                    Counter(method for method, _ in {(method_of(r).pos_emb, r["seed"]) for r in own}).values()
                ),
                "tokens": max(record["tokens"] for record in own),
                "documents": max(record["documents"] or 0 for record in own),
                "stderr": max(errors, default=0.0),
                "longest": max(record["length"] for record in own),
                "runs": _runs(own),
            }
        )
    return facts


def environments(records: Iterable[AnyRecord]) -> list[str]:
    """The commits, machines and versions that measured the records."""
    found = dict.fromkeys(
        (entry["commit"], entry["machine"], entry["versions"]) for record in records if (entry := record["environment"])
    )
    return [
        escape_markdown(f"commit {commit or 'unknown'}, {machine}, {versions}") for commit, machine, versions in found
    ]


def rank(setting: Setting) -> tuple[int, str]:
    return corpus_rank(setting.corpus), setting.corpus or ""


def _runs(records: Sequence[AnyRecord]) -> str:
    """The number of runs, and their methods in the order of the tables, each with its number of runs unless it is 1."""
    runs = dict.fromkeys(
        (method_of(record).pos_emb, (record["checkpoint"] or {}).get("fingerprint")) for record in records
    )
    counts = Counter(pos_emb for pos_emb, _ in runs)
    methods = published("kerple-3").ordered(map(Method, counts))
    names = [display_name(method) + (f" {n}" if (n := counts[method.pos_emb]) > 1 else "") for method in methods]
    return f"{len(runs)} run{'s' * (len(runs) != 1)}: {', '.join(names)}"


def _range(counts: Iterable[int]) -> str:
    low, high = min(counts := list(counts)), max(counts)
    return str(low) if low == high else f"{low} to {high}"
