from megatron.config import Config
from tests.support.errors import assert_rejected


def test_steps_of_checkpoints(flat):
    def steps(**keys) -> list[int]:
        checkpoint = Config.from_flat({**flat, **keys}).checkpoint
        return [step for step in range(101) if checkpoint.saves(step)]

    assert steps() == []
    assert steps(**{"checkpoint-factor": 20}) == [20, 40, 60, 80, 100]
    assert steps(save_interval=50.0, extra_save_iters=[0, 1, 7, 50]) == [0, 1, 7, 50, 100]
    assert steps(**{"checkpoint-scale": "log", "checkpoint-factor": 2}) == [1, 2, 4, 8, 16, 32, 64]
    # 1, 1.5, 2.25, 3.375, 5.0625 ...
    assert steps(checkpoint_scale="log", checkpoint_factor=1.5) == [
        1,
        2,
        3,
        5,
        7,
        11,
        17,
        25,
        38,
        57,
        86,
    ]
    assert steps(checkpoint_scale="log", extra_save_iters=[3]) == [3]
    assert_rejected(r"save_interval.*2\.5.*checkpoint_scale", steps, save_interval=2.5)
    assert_rejected(
        r"save_interval.*1\.0.*checkpoint_scale.*1\.01",
        steps,
        save_interval=1,
        checkpoint_scale="log",
    )
    assert_rejected("checkpoint_scale log requires save_interval", steps, checkpoint_scale="log")
