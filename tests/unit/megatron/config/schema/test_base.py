"""Types of values: no implicit conversion, except what YAML makes necessary."""

import pytest

from megatron.config import Config
from tests.support.errors import assert_rejected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num-layers": "2"}, "\"num-layers\".*'2'"),
        ({"num-layers": 0}, '"num-layers".*1.*0'),
        ({"no-weight-tying": "true"}, "\"no-weight-tying\".*true.*'true'"),
        ({"save": 3}, '"save".*3'),
        ({"pipe-partition-method": "unifrom"}, "\"pipe-partition-method\".*parameters.*'unifrom'"),
        ({"norm": "scalenorm"}, "\"norm\".*'layernorm'.*'rmsnorm'.*'scalenorm'"),
        (
            {"optimizer": {"type": "Adagrad"}},
            "\"optimizer\\.type\".*'adam', 'adamw', 'lion', 'sgd', 'muon'.*'adafactor'",
        ),
        ({"optimizer": {"params": {"lr": "high"}}}, r'"optimizer\.params\.lr"'),
        ({"optimizer": {"params": {"betas": [0.9, 1.0]}}}, r'"optimizer\.params\.betas\.1".*1'),
        ({"optimizer": "Adam"}, "\"optimizer\".*'Adam'"),
        ({"train-data-paths": [1]}, r'"train-data-paths\.0"'),
        ({"evaluation-lengths": ["8"]}, "\"evaluation-lengths\\.0\".*'8'"),
        ({"extrapolation-lengths": []}, '"extrapolation-lengths".*1'),
        ({"pos-emb-options": [1]}, '"pos-emb-options"'),
        ({"hidden-dropout": 1}, '"hidden-dropout".*1'),
    ],
)
def test_wrong_types(flat, keys, message):
    assert_rejected(f"^here: {message}", Config.from_flat, {**flat, **keys}, source="here")


def test_conversions(flat):
    config = Config.from_flat(
        {**flat, "train-iters": 1e5, "train-data-paths": "a", "weight-decay": 1}
    )
    assert config.schedule.train_iters == 100_000
    assert isinstance(config.schedule.train_iters, int)
    assert config.data.train_data_paths == ("a",)
    assert config.optimizer.weight_decay == 1.0
