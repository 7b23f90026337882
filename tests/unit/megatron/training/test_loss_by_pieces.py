"""The loss by pieces in every layout that has its own way to the output layer's weight: the losses of one rank."""

import pytest

from megatron.config import Config
from megatron.training.loop import train
from tests.support.runs import metrics, training_settings

LAYOUTS = {
    "tensor": {"model_parallel_size": 2},
    "pipeline": {"pipe_parallel_size": 2, "gradient_accumulation_steps": 2, "no_weight_tying": False},
    "zero-3": {"zero_optimization": {"stage": 3}},
}
VOCABULARY = 512
BY_PIECES = {
    "megatron.model.gpt:mean_loss": None,  # what would make the logits whole
    "megatron.model.loss:CHUNK_ELEMENTS": VOCABULARY * 5,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_by_pieces_train_as_one_with_whole_logits(layout, ranks, tmp_path, data_path):
    keys = {"padded_vocab_size": VOCABULARY, "save": None, "load": None}
    tied = {name: value for name, value in LAYOUTS[layout].items() if name == "no_weight_tying"}
    train(Config.from_flat(training_settings(tmp_path / "one", data_path, **keys, **tied)))
    ranks.train(training_settings(tmp_path / "two", data_path, num_gpus=2, **keys, **LAYOUTS[layout]), BY_PIECES)
    for name in ("train/loss", "train/grad_norm", "validation/loss", "kernel/bias_p/mean"):
        ours, theirs = metrics(tmp_path / "two", name), metrics(tmp_path / "one", name)
        assert ours
        assert ours == pytest.approx(theirs, abs=1e-4), name
