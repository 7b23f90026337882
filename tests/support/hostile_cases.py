"""The groups of hostile inputs of the soak test: `FILES` and `CONFIGS`."""

import atexit
import contextlib
import functools
import random
import re
import shutil
import tempfile
from pathlib import Path

from tests.soak.cases import Case, MakeCase
from tests.support import hostile_checkpoints, hostile_configs, hostile_results
from tests.support.checkpoints import write_checkpoint, write_corpus
from tests.support.hostile_data import hostile_dataset, hostile_download, hostile_input, hostile_journal
from tests.support.runs import training_settings

# With these values of `save` and the like, a configuration would be right to write outside the folder of its case.
_OUTSIDE = re.compile(rb'"(/|\.\./\.\.)"')


def hostile_result(generator: random.Random, folder: Path, resources: contextlib.ExitStack) -> Case:
    """Results, sweep journals, metrics, benchmark files, names and options, for the commands that read them."""
    data = write_corpus(folder)
    write_checkpoint(folder / "checkpoints", "kerple_log", data)
    (case,) = hostile_results.cases(folder / "in", generator.getrandbits(32), 1, folder / "checkpoints")
    return Case(case.description, case.command, statuses=(0, 1, 2), problem=case.problem)


def hostile_checkpoint(kind: str) -> MakeCase:
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


def hostile_config(generator: random.Random, folder: Path, resources: contextlib.ExitStack) -> Case:
    """A configuration of a run of two iterations, for train.py."""
    settings = training_settings(folder, write_corpus(folder, documents=80), train_iters=2, save_interval=1)
    while True:
        (mutation,) = hostile_configs.mutations(settings, generator.getrandbits(32), 1)
        if not _OUTSIDE.search(mutation.content) and not any(
            word.endswith(("=/", '"/"', '../.."')) for word in mutation.overrides
        ):
            break
    config = folder / "config.yml"
    config.write_bytes(mutation.content)
    overrides = ["--set", *mutation.overrides] if mutation.overrides else []
    return Case(
        mutation.description,
        ["train.py", str(config), *overrides],
        stop_at=b"iteration 1/",
        accepted_at=b" on cpu: data parallel ",
    )


FILES: dict[str, MakeCase] = {
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
CONFIGS: dict[str, MakeCase] = {"training": hostile_config}
