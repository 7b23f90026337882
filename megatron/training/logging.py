"""Where a run's numbers go: the console (and a copy of it on disk), TensorBoard, Weights & Biases."""

import json
import os
import time
from pathlib import Path

from megatron.config import Config, UserError
from megatron.training.distributed import Layout


class Reporter:
    """Prints once per run, on rank 0, and copies what it prints to `log-dir`."""

    def __init__(self, config: Config, layout: Layout):
        self.is_main = layout.is_main
        self._file = None
        if self.is_main and config.logging.log_dir:
            folder = Path(config.logging.log_dir)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._file = open(folder / "train.log", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
            except OSError as error:
                raise UserError(f"log-dir: {folder}: cannot be written ({error.strerror})") from error

    def __call__(self, text: str) -> None:
        if not self.is_main:
            return
        print(text, flush=True)
        if self._file is not None:
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Trackers:
    """Numbers over steps, on rank 0 only: JSON lines in `log-dir`, TensorBoard, Weights & Biases, where asked for."""

    def __init__(self, config: Config, layout: Layout):
        self._tensorboard = None
        self._wandb = None
        self._lines = None
        if not layout.is_main:
            return
        logging = config.logging
        if logging.log_dir:
            self._lines = open(Path(logging.log_dir) / "metrics.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        if logging.tensorboard_dir:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(logging.tensorboard_dir)
        if logging.use_wandb:
            self._wandb = _start_wandb(config)

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Log numbers under their names at an optimizer step."""
        if self._lines is not None:
            self._lines.write(json.dumps({"iteration": step, **values}) + "\n")
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(values, step=step)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def _start_wandb(config: Config):
    try:
        import wandb
    except ImportError as error:
        raise UserError(
            "use_wandb: the package wandb is not installed; install it or set use_wandb to false"
        ) from error
    logging = config.logging
    if logging.wandb_host:
        os.environ.setdefault("WANDB_BASE_URL", logging.wandb_host)
    try:
        return wandb.init(
            project=logging.wandb_project,
            group=logging.wandb_group,
            entity=logging.wandb_team,
            name=logging.wandb_run_name,
            config=config.to_flat(),
        )
    except (wandb.errors.UsageError, wandb.errors.CommError) as error:
        raise UserError(
            f"use_wandb: {str(error).splitlines()[0]}; set WANDB_API_KEY, or WANDB_MODE=offline to log to disk"
        ) from error
