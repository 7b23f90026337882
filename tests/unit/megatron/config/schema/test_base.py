"""Types of values: no implicit conversion, except what YAML makes necessary."""

import pytest

from megatron.config import Config, UserError


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num-layers": "2"}, "\"num-layers\": must be an integer, not '2'"),
        ({"num-layers": 2.5}, '"num-layers": must be an integer'),
        ({"num-layers": True}, '"num-layers": must be an integer, not True'),
        ({"num-layers": 0}, '"num-layers": must be greater than or equal to 1, not 0'),
        ({"no-weight-tying": "true"}, "\"no-weight-tying\": must be true or false, not 'true'"),
        ({"no-weight-tying": 1}, '"no-weight-tying": must be true or false'),
        ({"save": 3}, '"save": must be a string, not 3'),
        ({"norm": "scalenorm"}, "\"norm\": must be 'layernorm' or 'rmsnorm', not 'scalenorm'"),
        (
            {"optimizer": {"type": "Adagrad"}},
            "\"optimizer.type\": must be 'adam', 'adamw', 'lion', 'sgd', 'muon' or 'adafactor'",
        ),
        ({"optimizer": {"type": "SM3"}}, "\"optimizer.type\": must be adafactor .its state is as small., not 'SM3'"),
        ({"optimizer": {"type": "CPU_Adam"}}, "\"optimizer.type\": must be adam .*stage 1.*, not 'CPU_Adam'"),
        ({"optimizer": {"type": "OneBitAdam"}}, "\"optimizer.type\": must be adam .*, not 'OneBitAdam'"),
        ({"optimizer": {"type": "Adam8bit"}}, '"optimizer.type": must be adam, with use_bnb_optimizer: true'),
        ({"optimizer": {"params": {"lr": "high"}}}, '"optimizer.params.lr": must be a number'),
        ({"optimizer": {"params": {"lr": float("nan")}}}, '"optimizer.params.lr" is nan; numbers must be finite'),
        ({"optimizer": {"params": {"betas": [0.9]}}}, '"optimizer.params.betas.1": is missing, not'),
        ({"optimizer": {"params": {"betas": [0.9, 1.0]}}}, '"optimizer.params.betas.1": must be less than 1'),
        ({"optimizer": {"params": {"apex": "yes"}}}, '"optimizer.params.apex": must be true or false'),
        ({"optimizer": "Adam"}, "\"optimizer\" must be a mapping of params, type, not 'Adam'"),
        ({"optimizer": {"params": 3}}, '"optimizer.params" must be a mapping of .*lr'),
        ({"fp16": True}, '"fp16" must be a mapping'),
        ({"train-data-paths": [1]}, '"train-data-paths.0": must be a string'),
        ({"evaluation-lengths": 8}, '"evaluation-lengths": must be a list, not 8'),
        ({"evaluation-lengths": ["8"]}, "\"evaluation-lengths.0\": must be an integer, not '8'"),
        ({"extrapolation-lengths": []}, '"extrapolation-lengths": must have at least 1 item'),
        ({"pos-emb-options": [1]}, '"pos-emb-options": must be a mapping'),
        ({"evaluation-lengths": [0]}, '"evaluation-lengths.0": must be greater than or equal to 1'),
        ({"hidden-dropout": 1}, '"hidden-dropout": must be less than 1'),
    ],
)
def test_wrong_types(flat, keys, message):
    with pytest.raises(UserError, match=f"^here: {message}"):
        Config.from_flat({**flat, **keys}, source="here")


def test_conversions(flat):
    config = Config.from_flat({**flat, "train-iters": 1e5, "train-data-paths": "a", "weight-decay": 1})
    assert config.schedule.train_iters == 100_000
    assert isinstance(config.schedule.train_iters, int)
    assert config.data.train_data_paths == ("a",)
    assert config.optimizer.weight_decay == 1.0
