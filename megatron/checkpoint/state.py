"""Where a run stands."""

from dataclasses import asdict, dataclass
from typing import Any

# Holds this and the other plain values of a run.
STATE_FILE = "mp_rank_00_model_states.pt"


@dataclass
class TrainingState:
    """What resuming needs beside weights and optimizer.

    iteration: optimizer steps done. consumed_samples: training sequences read by all replicas, which is the data's
    position. consumed_valid_samples: the same of the validation stream. tokens: training tokens read. data_order: names
    the order of the training samples, of which consumed_samples is a position; empty where it is not known.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_valid_samples: int = 0
    tokens: int = 0
    data_order: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainingState":
        return cls(**{name: values[name] for name in cls.__dataclass_fields__ if name in values})
