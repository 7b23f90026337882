"""Training and testing of decoders on the length tests."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.chomsky.decoder import DecoderExperiment
from megatron.chomsky.experiment import DECODER_SETTINGS, TEST_SEED
from megatron.model.gpt import GPT

TINY = {
    "steps": 4,
    "batch": 8,
    "train_longest": 35,
    "test_longest": 140,
    "hidden_size": 16,
    "num_heads": 2,
}


def experiment(task="associative_recall", pos_emb="kerple_log", **settings):
    settings = type(DECODER_SETTINGS)(
        **{**vars(DECODER_SETTINGS), **TINY, "test_samples": 48, **settings}
    )
    return DecoderExperiment(task, pos_emb, 1, settings, torch.device("cpu"))


def test_loss_and_accuracy_are_those_of_the_scored_positions(monkeypatch):
    monkeypatch.setattr("megatron.chomsky.decoder.TEST_TOKENS", 500)
    learner = experiment()
    assert isinstance(learner.model, GPT)
    batch = learner.task.sample(np.random.default_rng(3), 8, 35)
    logits = learner.model(torch.from_numpy(batch.tokens))
    expected = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.targets).flatten())
    assert learner.loss(np.random.default_rng(3), 35).item() == pytest.approx(
        expected.item(), rel=1e-6
    )
    result = learner.test(lambda tested, length: None)
    assert list(result["accuracies"]) == list(result["distances"]) == ["35", "70", "140"]
    tokens, targets, distances = learner.task.sample(
        np.random.default_rng([*learner.random_seed(140), TEST_SEED]), 48, 140
    )
    hits = learner.model(torch.from_numpy(tokens)).argmax(-1).numpy() == targets
    scored = targets != -100
    assert result["accuracies"]["140"] == pytest.approx(hits[scored].mean())
    bins = result["distances"]["140"]
    assert [int(first) for first in bins] == [2, 4, 8, 16, 32, 64, 128][-len(bins) :]
    for first, counted in bins.items():
        within = scored & (distances >= int(first)) & (distances < 2 * int(first))
        assert counted == [hits[within].sum(), within.sum()]
    assert sum(count for _, count in bins.values()) == 48 * 4
    assert result["score"] == pytest.approx(
        (result["accuracies"]["70"] + result["accuracies"]["140"]) / 2
    )
