"""Train an encoder on one task at short lengths, and count its right answers at longer ones.

Every batch is drawn from (seed, task, step) alone, so a run that was interrupted goes on as if it had not been.
"""

import io
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.chomsky.encoder import Encoder
from megatron.chomsky.tasks import TASKS, Task
from megatron.utils.errors import UserError
from megatron.utils.files import write_atomically

TEST_SEED = 1_000_000_007
SAVE_SECONDS = 60.0


@dataclass(frozen=True)
class Settings:
    """How each run is trained and tested; lengths in tokens, both ends included.

    Defaults: training lengths 1 to 40, test lengths 41 to 500 and the encoder are DAPE's; batch, rate and steps those
    of the benchmark's released example.
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

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise UserError(f"{name} must be above 0, not {value}")
        if self.test_longest <= self.train_longest:
            raise UserError(
                f"test_longest ({self.test_longest}) must be beyond train_longest ({self.train_longest}): "
                "the benchmark asks what a model does with inputs longer than those it learnt from"
            )
        if self.hidden_size % self.num_heads:
            raise UserError(f"hidden_size {self.hidden_size} is no multiple of num_heads {self.num_heads}")

    @property
    def test_lengths(self) -> range:
        return range(self.train_longest + 1, self.test_longest + 1, self.test_every)


class Run:
    """One task, one method, one seed."""

    def __init__(self, task: str, pos_emb: str, seed: int, settings: Settings, device: torch.device, saved: Path):
        """`saved`: the file for its unfinished state. Raises UserError when that file is another run's."""
        self.task: Task = TASKS[task]
        self.seed, self.settings, self.device, self.saved = seed, settings, device, saved
        longest = settings.test_longest + self.task.output_length(settings.test_longest)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = Encoder(
                self.task.symbols + 1,
                self.task.classes,
                pos_emb,
                num_layers=settings.num_layers,
                hidden_size=settings.hidden_size,
                num_heads=settings.num_heads,
                max_positions=longest,
            ).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=settings.learning_rate)
        self.made_from = {"task": task, "pos_emb": pos_emb, "seed": seed, **asdict(settings)}
        self.step = 0
        self._resume()

    def train(self, report: Callable[[int, float], None]) -> None:
        """The steps that are missing; `report(step, loss)` after each tenth, and after the last.

        The loss, and hence what is optimised, is the mean cross entropy in nats over the targets that count.
        """
        written = time.monotonic()
        self.model.train()
        while self.step < self.settings.steps:
            generator = np.random.default_rng(self._seeds(self.step))
            length = int(generator.integers(1, self.settings.train_longest + 1))
            logits, targets, counted = self._answer(generator, self.settings.batch, length)
            loss = F.cross_entropy(logits[counted], targets[counted])
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.step += 1
            if self.step % 10 == 0 or self.step == self.settings.steps:
                report(self.step, loss.item())
            if time.monotonic() - written > SAVE_SECONDS:
                self._save()
                written = time.monotonic()
        self._save()

    @torch.no_grad()
    def accuracy(self, length: int) -> float:
        """The mean over samples of length `length` of the share of right answers among those that count."""
        self.model.eval()
        generator = np.random.default_rng([*self._seeds(length), TEST_SEED])
        samples = max(1, min(self.settings.test_samples, 64 * self.settings.train_longest**2 // length**2 + 16))
        right, left = 0.0, self.settings.test_samples
        while left:
            logits, targets, counted = self._answer(generator, min(left, samples), length)
            hits = ((logits.argmax(dim=-1) == targets) & counted).sum(dim=1) / counted.sum(dim=1)
            right += hits.double().sum().item()
            left -= len(targets)
        return right / self.settings.test_samples

    def discard(self) -> None:
        """Forget the unfinished state: the run's result is stored elsewhere."""
        self.saved.unlink(missing_ok=True)

    def _answer(self, generator: np.random.Generator, samples: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, targets and which count, `[b, m(, classes)]`: the model reads the input and then m empty places,
        where it answers.
        """
        batch = self.task.sample(generator, samples, length)
        empty = np.full(batch.targets.shape, self.task.symbols)
        symbols = torch.from_numpy(np.concatenate((batch.inputs, empty), axis=1)).to(self.device)
        logits = self.model(symbols)[:, -batch.targets.shape[1] :].float()
        return logits, *(torch.from_numpy(part).to(self.device) for part in (batch.targets, batch.counted))

    def _seeds(self, number: int) -> list[int]:
        return [self.seed, zlib.crc32(self.task.name.encode()), number]

    def _save(self) -> None:
        state = {
            "made_from": self.made_from,
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        content = io.BytesIO()
        torch.save(state, content)
        self.saved.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.saved, content.getvalue())

    def _resume(self) -> None:
        if not self.saved.is_file():
            return
        try:
            state = torch.load(self.saved, map_location=self.device, weights_only=True)
        except Exception as error:  # torch raises a dozen kinds
            raise UserError(f"{self.saved} holds no state of a run; remove it to begin this run anew") from error
        if state["made_from"] != self.made_from:
            raise UserError(
                f"{self.saved} was made with other settings; give them again, another --output, or remove the file"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
