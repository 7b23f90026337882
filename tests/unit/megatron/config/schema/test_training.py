import pytest

from megatron.config import Config
from megatron.config.schema.training import TrainingConfig
from tests.support.errors import assert_rejected


def test_extrapolation_budget():
    assert TrainingConfig(extrapolation_lengths=[16, 32]).extrapolation_budget == 65_536
    assert TrainingConfig(extrapolation_lengths=[131_072]).extrapolation_budget == 131_072
    assert (
        TrainingConfig(extrapolation_lengths=[16], extrapolation_tokens=64).extrapolation_budget
        == 64
    )


DISCRETE = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 4,
    "max_difficulty": 8,
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [4, 8], "max_step": [10]},
}
LINEAR = {
    **DISCRETE,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 2},
}


@pytest.mark.parametrize(
    "keys", [DISCRETE, LINEAR, {"enabled": False}, {**LINEAR, "min_difficulty": 8}]
)
def test_complete_schedules(flat, keys):
    config = Config.from_flat({**flat, "seq-length": 8, "curriculum-learning": keys})
    assert config.curriculum.enabled == keys["enabled"]
    assert config.notices == ()


def test_a_schedule_that_training_does_not_complete_is_a_notice(flat):
    keys = {**flat, "seq-length": 8, "curriculum-learning": LINEAR}
    assert Config.from_flat({**keys, "train_iters": 12, "lr_decay_iters": 12}).notices == ()
    notices = Config.from_flat({**keys, "train_iters": 9}).notices
    assert any("total_curriculum_step is 10, but train_iters is 9" in notice for notice in notices)


def test_a_schedule_of_one_length_is_a_notice(flat):
    keys = {**LINEAR, "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 9}}
    (notice,) = Config.from_flat({**flat, "seq-length": 8, "curriculum-learning": keys}).notices
    assert notice.startswith("curriculum_learning.schedule_config.difficulty_step 9: ")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"min_difficulty": None},
            r"curriculum_learning\.min_difficulty.*schedule_type fixed_discrete",
        ),
        ({"schedule_type": "fixed_root"}, r"schedule_config\.total_curriculum_step.*fixed_root"),
        ({"curriculum_type": "voc"}, "'seqlen'"),
        ({"schedule_config": {"difficulty": [4, 8], "max_step": [5, 10]}}, "max_step.*2"),
        ({"schedule_config": {"difficulty": [4, 6, 8], "max_step": [5, 5]}}, "max_step"),
        ({"schedule_config": {"difficulty": [2, 8], "max_step": [5]}}, "min_difficulty 4"),
        (
            {"schedule_config": {**DISCRETE["schedule_config"], "root_degree": 2}},
            r"schedule_config\.root_degree.*schedule_type fixed_discrete",
        ),
        ({**LINEAR, "max_difficulty": 16}, "max_difficulty 16.*seq_length 8"),
        ({"metric": "seqlen"}, r'"curriculum_learning\.metric"'),
    ],
)
def test_wrong_schedules(flat, keys, message):
    assert_rejected(
        message,
        Config.from_flat,
        {**flat, "seq_length": 8, "curriculum_learning": {**DISCRETE, **keys}},
    )
