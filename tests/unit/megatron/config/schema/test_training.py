from megatron.config.schema.training import TrainingConfig


def test_extrapolation_budget():
    assert TrainingConfig(extrapolation_lengths=[16, 32]).extrapolation_budget == 65_536
    assert TrainingConfig(extrapolation_lengths=[131_072]).extrapolation_budget == 131_072
    assert TrainingConfig(extrapolation_lengths=[16], extrapolation_tokens=64).extrapolation_budget == 64
