"""What preprocessing notes on its way, so that a killed run can be taken up without losing or doubling a document.

`OUTPUT_PREFIX.progress.json` is replaced as a whole, and only after everything it tells of is on the disk. It says what
is being made of what, where in the input it was, and how long the output was then.
"""

import glob
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron.data.chunks import Position
from megatron.data.documents import EncodedChunk
from megatron.data.indexed_writer import WriterState
from megatron.data.manifest import Manifest
from megatron.utils.files import write_atomically
from megatron.utils.locks import Lock

_EXAMPLES = 5


@dataclass
class Rejected:
    """What was left out, whatever the key; of the unreadable documents the first few are told of."""

    bad: int = 0
    examples: list[str] = field(default_factory=list)
    other_subsets: dict[str, int] = field(default_factory=dict)

    def add(self, encoded: EncodedChunk) -> None:
        self.bad += len(encoded.bad)
        self.examples = (self.examples + encoded.bad)[:_EXAMPLES]
        for name, count in encoded.other_subsets.items():
            self.other_subsets[name] = self.other_subsets.get(name, 0) + count

    def copy(self) -> "Rejected":
        return Rejected(self.bad, list(self.examples), dict(self.other_subsets))


@dataclass
class OutputState:
    """How far the files of one key are."""

    writer: WriterState = field(default_factory=WriterState)
    text_bytes: int = 0
    empty: int = 0


@dataclass
class Progress:
    """Everything a later run has to know.

    Attributes:
        outputs: per key.
        manifests: per key, once every file is whole and verified: only their renaming is left.
    """

    position: Position
    bytes_read: int
    outputs: list[OutputState]
    rejected: Rejected
    manifests: list[Manifest] = field(default_factory=list)


class Journal:
    """The journal of one output, and the lock that keeps other processes away from it. A context manager.

    Args:
        work: what decides the output; a journal of other work is not gone on with. JSON values.
    """

    def __init__(self, output_prefix: str | Path, work: dict):
        self._prefix = output_prefix
        self._path = Path(f"{output_prefix}.progress.json")
        self._work = work
        self._lock = Lock(
            f"{output_prefix}.lock",
            f"another process is writing {output_prefix}; wait for it, or choose another prefix",
        )

    def __enter__(self) -> "Journal":
        self._lock.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._lock.__exit__(*exception)

    @property
    def exists(self) -> bool:
        return self._path.exists()

    def load(self) -> Progress | None:
        """What an earlier run of the same work noted; None, after saying so, if there is only another's."""
        try:
            noted = json.loads(self._path.read_bytes())
            progress, work = _decode(noted["progress"]), noted["work"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            print(f"{self._path}: unreadable, starting anew")
            return None
        if work == self._work:
            return progress
        changed = ", ".join(key for key in self._work if work.get(key) != self._work[key])
        print(f"{self._prefix}: an unfinished run was of another {changed or 'version'}; starting anew")
        return None

    def save(self, progress: Progress) -> None:
        noted = {"work": self._work, "progress": asdict(progress)}
        write_atomically(self._path, json.dumps(noted).encode())

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
        for left in self._path.parent.glob(f"{glob.escape(self._path.name)}.partial-*"):  # by a kill while saving
            left.unlink(missing_ok=True)


def _decode(noted: dict) -> Progress:
    return Progress(
        Position(*noted["position"]),
        noted["bytes_read"],
        [OutputState(WriterState(**output.pop("writer")), **output) for output in noted["outputs"]],
        Rejected(**noted["rejected"]),
        [Manifest(**manifest) for manifest in noted["manifests"]],
    )
