"""Train a small model on one task at short lengths, and measure its accuracy at longer ones.

Every batch is determined by (seed, task, step).
"""

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import FailFast, Field, TypeAdapter
from torch import Tensor, nn
from typing_extensions import NotRequired, TypedDict

from kerple.positional import project
from megatron.chomsky.encoder import Encoder
from megatron.chomsky.length_tasks import LENGTH_TASKS, LengthTask
from megatron.chomsky.tasks import TASKS, Task
from megatron.utils.errors import UserError
from megatron.utils.files import read_file, write_atomically
from megatron.utils.typed_json import Count, Float, Fraction, Int, Name, parse_json

TEST_SEED = 1_000_000_007
ACCURACY_SAMPLES = 64  # samples of a batch whose accuracies are averaged
MAX_RESULTS_BYTES = 1 << 26
DECODER = "decoder"


@dataclass(frozen=True)
class ExperimentSettings:
    """How each experiment is trained and tested. Lengths are in tokens.

    Training uses the lengths 1 to train_longest (from the shortest of the task for a decoder),
    testing every test_every-th length from train_longest + 1 to test_longest; for 0, train_longest
    and its doublings. The default lengths and sizes are DAPE's; batch size, learning rate and steps
    are those of the benchmark's released example. architecture: `decoder` for `LENGTH_TASKS`, with
    the defaults `DECODER_SETTINGS`; otherwise see `Encoder`.
    """

    steps: int = 10_000
    batch: int = 128
    learning_rate: float = 1e-3
    train_longest: int = 40
    test_longest: int = 500
    test_every: int = 1
    test_samples: int = 512
    num_layers: int = 5
    hidden_size: int = 256
    num_heads: int = 8
    architecture: str = "pre-norm"

    def __post_init__(self) -> None:
        if self.test_longest <= self.train_longest:
            raise UserError(
                f"test_longest ({self.test_longest}) must be above train_longest "
                f"({self.train_longest}): the benchmark tests longer inputs than it trains on"
            )
        if not self.test_every and self.test_longest < 2 * self.train_longest:
            raise UserError(
                f"test_longest ({self.test_longest}) must be at least twice train_longest "
                f"({self.train_longest}) if test_every is 0"
            )
        if self.hidden_size % self.num_heads:
            raise UserError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}"
            )

    @property
    def tasks(self) -> Mapping[str, Task | LengthTask]:
        """The tasks of the architecture, by name."""
        return LENGTH_TASKS if self.architecture == DECODER else TASKS

    @property
    def test_lengths(self) -> Sequence[int]:
        if self.test_every:
            return range(self.train_longest + 1, self.test_longest + 1, self.test_every)
        doublings = (self.test_longest // self.train_longest).bit_length()
        return [self.train_longest << power for power in range(doublings)]


DECODER_SETTINGS = ExperimentSettings(
    steps=1500,
    batch=64,
    learning_rate=2e-3,
    train_longest=64,
    test_longest=1024,
    test_every=0,
    test_samples=256,
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    architecture=DECODER,
)


class Result(TypedDict):
    """The result of one experiment. accuracies: from 0 to 1, by length as a decimal string. score:
    the mean of those above the longest training length. distances, of decoders:
    `[correct targets, targets]` by length and by bin of the distance; a bin is named by its
    smallest distance, a power of two, and ends before the next power.
    """

    task: Name
    pos_emb: Name
    seed: Int
    score: Fraction
    accuracies: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Fraction]
    distances: NotRequired[
        dict[str, dict[str, Annotated[list[Count], Field(min_length=2, max_length=2)]]]
    ]


class StoredResults(TypedDict):
    """The contents of `chomsky.json`. settings: those of `ExperimentSettings`."""

    settings: dict[str, int | Float | str]
    results: Annotated[list[Result], FailFast()]


_STORED_RESULTS = TypeAdapter(StoredResults)


class Experiment:
    """One task, method and seed; subclasses are for encoders and decoders."""

    warmup_steps = 1  # the learning rate rises linearly over these steps
    shortest = 1  # the length of the shortest training input

    def __init__(
        self, task: str, pos_emb: str, seed: int, settings: ExperimentSettings, device: torch.device
    ):
        self.name, self.pos_emb, self.seed = task, pos_emb, seed
        self.settings, self.device = settings, device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = self.build().to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=settings.learning_rate)

    def build(self) -> nn.Module:
        """A model with random weights."""
        raise NotImplementedError

    def loss(self, generator: np.random.Generator, length: int) -> Tensor:
        """The mean cross-entropy in nats of a training batch with inputs of this length."""
        raise NotImplementedError

    def accuracy(self, length: int) -> float:
        """The fraction of correct targets in test samples of this length."""
        raise NotImplementedError

    def test(self, report: Callable[[int, int], None]) -> Result:
        """The accuracy at every test length. Calls `report(lengths tested, length)` after each."""
        accuracies = {}
        for tested, length in enumerate(self.settings.test_lengths, start=1):
            accuracies[str(length)] = self.accuracy(length)
            report(tested, length)
        return Result(
            task=self.name,
            pos_emb=self.pos_emb,
            seed=self.seed,
            score=mean_beyond(accuracies, self.settings.train_longest),
            accuracies=accuracies,
        )

    def train(self, report: Callable[[int, float], None]) -> None:
        """Train all steps. Calls `report(step, loss)` after every tenth step and the last."""
        self.model.train()
        for step in range(self.settings.steps):
            # A batch of one random length. Seeds are those of the step, also of dropout.
            generator = np.random.default_rng(self.random_seed(step))
            length = int(generator.integers(self.shortest, self.settings.train_longest + 1))
            torch.manual_seed(zlib.crc32(repr(self.random_seed(step)).encode()))
            loss = self.loss(generator, length)

            # An optimizer step with warmup.
            for group in self.optimizer.param_groups:
                group["lr"] = self.settings.learning_rate * min(1.0, (step + 1) / self.warmup_steps)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            project(self.model)
            if (step + 1) % 10 == 0 or step + 1 == self.settings.steps:
                report(step + 1, loss.item())

    def random_seed(self, number: int) -> list[int]:
        """The seed of a batch of this experiment's task."""
        return [self.seed, zlib.crc32(self.name.encode()), number]


class EncoderExperiment(Experiment):
    """An encoder on a task of the Chomsky hierarchy. The loss covers all targets, also those after
    the end symbol.
    """

    def build(self) -> nn.Module:
        settings = self.settings
        self.task = TASKS[self.name]
        return Encoder(
            self.task.symbols + 1,  # and a placeholder for the positions of the answer
            self.task.classes,
            self.pos_emb,
            num_layers=settings.num_layers,
            hidden_size=settings.hidden_size,
            num_heads=settings.num_heads,
            architecture=settings.architecture,
            max_positions=settings.test_longest + self.task.output_length(settings.test_longest),
        )

    def loss(self, generator: np.random.Generator, length: int) -> Tensor:
        logits, targets, _ = self._forward(generator, self.settings.batch, length)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def accuracy(self, length: int) -> float:
        """The fraction of correct targets among those that count, in batches of ACCURACY_SAMPLES,
        averaged over the batches.
        """
        self.model.eval()
        generator = np.random.default_rng([*self.random_seed(length), TEST_SEED])
        most = 64 * self.settings.train_longest**2 // length**2 + 16  # samples computed at once
        accuracies = []
        for first in range(0, self.settings.test_samples, ACCURACY_SAMPLES):
            remaining = min(ACCURACY_SAMPLES, self.settings.test_samples - first)
            correct = total = 0
            while remaining:
                logits, targets, counted = self._forward(generator, min(remaining, most), length)
                correct += int(((logits.argmax(dim=-1) == targets) & counted).sum())
                total += int(counted.sum())
                remaining -= len(targets)
            accuracies.append(correct / total)
        return sum(accuracies) / len(accuracies)

    def _forward(
        self, generator: np.random.Generator, samples: int, length: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits `[b, m, classes]`, targets `[b, m]` and which of them count, bool `[b, m]`, for m
        output tokens.

        The model reads the input followed by m placeholders; its predictions there are the answer.
        """
        batch = self.task.sample(generator, samples, length)
        placeholders = np.full(batch.targets.shape, self.task.symbols)
        symbols = np.concatenate((batch.inputs, placeholders), axis=1)
        logits = self.model(torch.from_numpy(symbols).to(self.device))
        targets = torch.from_numpy(batch.targets).to(self.device)
        counted = torch.from_numpy(batch.counted).to(self.device)
        return logits[:, -targets.shape[1] :].float(), targets, counted


def mean_beyond(accuracies: Mapping[str, float], longest: int) -> float:
    """The mean of the accuracies at lengths above the longest of training; NaN if there is none."""
    longer = [accuracy for length, accuracy in accuracies.items() if int(length) > longest]
    if not longer:
        return math.nan
    return sum(longer) / len(longer)


def read_chomsky_results(path: Path, settings: ExperimentSettings) -> list[Result]:
    """The results of earlier runs, none without a file. Raises UserError if the settings differ."""
    if not path.exists():
        return []
    try:
        content = parse_json(read_file(path, MAX_RESULTS_BYTES), _STORED_RESULTS, str(path))
    except UserError as error:
        raise UserError(
            f"{error}; correct or remove the file, or choose another --output"
        ) from None

    # Results of other settings must not be averaged with those of this run.
    stored = content["settings"]
    changes = []
    for name, value in asdict(settings).items():
        if stored.get(name) != value:
            changes.append(f"{name} {stored.get(name)}, not {value}")
    if changes:
        raise UserError(
            f"{path} contains results of other settings ({', '.join(changes)}): use the same "
            "settings, or choose another --output"
        )

    # A score is the mean accuracy at the lengths beyond those of training.
    for number, result in enumerate(content["results"]):
        expected = mean_beyond(result["accuracies"], settings.train_longest)
        if not math.isclose(result["score"], expected, abs_tol=1e-6):
            raise UserError(
                f"{path}: results[{number}].score {result['score']} is not the mean of its "
                "accuracies"
            )
    return content["results"]


def write_chomsky_results(
    path: Path, settings: ExperimentSettings, results: Sequence[Result]
) -> None:
    """Replace the file atomically."""
    content = {"settings": asdict(settings), "results": list(results)}
    write_atomically(path, json.dumps(content, indent=1).encode() + b"\n")
