"""The groups of hostile inputs of the soak test: `FILES`."""

import atexit
import contextlib
import functools
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st

from tests.soak.cases import Case, MakeCase
from tests.support import hostile_checkpoints, hostile_results
from tests.support.checkpoints import write_checkpoint, write_corpus
from tests.support.hostile_data import hostile_dataset, hostile_download, hostile_input, hostile_journal


def hostile_result(generator: random.Random, folder: Path, resources: contextlib.ExitStack) -> Case:
    """Results, sweep journals, metrics, benchmark files, names and options, for the commands that read them."""
    data = write_corpus(folder)
    write_checkpoint(folder / "checkpoints", "kerple_log", data)
    (case,) = hostile_results.cases(folder / "in", generator.getrandbits(32), 1, folder / "checkpoints")
    return Case(case.description, case.command, statuses=(0, 1, 2), problem=case.problem)


def hostile_checkpoint(kind: str) -> Callable[..., Case]:
    """Checkpoints, archives of checkpoints, Hugging Face folders and tokenizers, for the tools in tools/ckpts."""

    def make(generator: random.Random, folder: Path, resources: contextlib.ExitStack) -> Case:
        place = folder / "case"
        (place / "in").mkdir(parents=True)
        name, command, verified = hostile_checkpoints.MAKERS[kind](generator, _valid_checkpoints(), place)
        case = hostile_checkpoints.HostileCase(name, kind, command, place, verified)

        def problem(status: int, output: str) -> str | None:
            return "; ".join(hostile_checkpoints.problems(case, status, output)) or None

        return Case(name, command, statuses=(0, 1, 2), problem=problem)

    return make


@functools.cache
def _valid_checkpoints() -> Path:
    """What hostile checkpoints are made from, in a temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="soak_"))
    atexit.register(shutil.rmtree, folder)
    hostile_checkpoints.write_base(folder / "base")
    return folder / "base"


def seeded(make: Callable[..., Case]) -> MakeCase:
    return lambda draw, folder, resources: make(random.Random(draw(st.integers(0, 2**64))), folder, resources)


_FILES: dict[str, Callable[..., Case]] = {
    "inputs of preprocessing": hostile_input,
    "datasets (.bin, .idx, manifest)": hostile_dataset,
    "journals of preprocessing": hostile_journal,
    "downloads": hostile_download,
    "checkpoint: files of torch": hostile_checkpoint("file"),
    "checkpoint: manifest": hostile_checkpoint("manifest"),
    "checkpoint: latest": hostile_checkpoint("latest"),
    "checkpoint: configuration": hostile_checkpoint("config"),
    "checkpoint: archive": hostile_checkpoint("archive"),
    "checkpoint: safetensors, Hugging Face": hostile_checkpoint("convert"),
    "tokenizers": hostile_checkpoint("tokenizer"),
    "results, metrics, journals, names": hostile_result,
}
FILES = {name: seeded(make) for name, make in _FILES.items()}
