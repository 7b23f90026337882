"""Training runs in this process: losses, curricula, self-checks, and errors for unusable input."""

import json
from types import SimpleNamespace

import pytest
import torch

from kerple.attention import self_check
from kerple.attention.backends.chunked import chunked_attention
from kerple.positional import KerpleLog, registry
from megatron.checkpoint.directory import saved_iterations
from megatron.checkpoint.manifest import write_manifest_of_folder
from megatron.checkpoint.saving import Checkpointer
from megatron.checkpoint.state_dict import TrainingState
from megatron.config import Config, UserError
from megatron.data.datasets import build_datasets
from megatron.tokenizer.tokenizer import build_tokenizer
from megatron.training import distributed
from megatron.training.engine import Engine, GPTWithLoss
from megatron.training.loop import Trainer, train
from megatron.training.optimizer import Schedule
from megatron.utils.files import METRICS
from tests.support.configs import make_config
from tests.support.errors import assert_rejected
from tests.support.runs import (
    copy_checkpoint,
    metrics,
    trained,
    training_settings,
    unwrapped,
    weights,
)
from tests.support.self_check import install_kernels, use_cpu_as_gpu

EXPLODE = {
    "optimizer": {"type": "Adam", "params": {"lr": 1e20}},
    "warmup": 0.0,
    "gradient_clipping": 0.0,
}


CURRICULUM = {
    "enabled": True,
    "min_difficulty": 8,
    "max_difficulty": 32,
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [8, 16, 32], "max_step": [2, 4]},
}


@pytest.mark.parametrize("pos_emb", ["dape_v2_kerple", "cope", "transformer_xl", "xpos"])
@pytest.mark.quick(1)
def test_training_changes_all_positional_parameters_and_lowers_the_loss(
    pos_emb, tmp_path, data_path
):
    trained(tmp_path, data_path, pos_emb=pos_emb)
    losses = metrics(tmp_path)
    assert losses[6] < losses[1] - 0.05
    before, after = weights(tmp_path, 3), weights(tmp_path, 6)
    positional = [name for name in after if "attention.rpe." in name]
    assert bool(positional) == (pos_emb != "xpos")
    for name in positional:
        assert not torch.equal(before[name], after[name]), name


def test_validation_on_the_training_data(tmp_path, data_path, capsys):
    paths = {"train_data_paths": [data_path], "valid_data_paths": [data_path]}
    keys = {"train_iters": 1, "eval_iters": 1, "log_interval": 5}
    trained(tmp_path / "1", data_path, **keys)
    assert "trains on them" not in capsys.readouterr().out
    trained(tmp_path / "2", None, **paths, **keys)
    assert "valid data: this run trains on them: 80 of the 80" in unwrapped(capsys.readouterr().out)


def test_a_masked_loss_is_the_mean_over_the_tokens_of_the_global_batch(tmp_path, data_path):
    """Documents end at different places in the micro-batches."""
    losses, final = [], []
    for micro_batch in (8, 1):
        folder = tmp_path / str(micro_batch)
        keys = {
            "train_micro_batch_size_per_gpu": micro_batch,
            "eod_mask_loss": True,
            "precision": "fp32",
        }
        trained(folder, data_path, **keys)
        losses.append([*metrics(folder).values(), *metrics(folder, "validation/loss").values()])
        final.append(torch.cat([tensor.flatten() for tensor in weights(folder, 6).values()]))
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    assert (final[1] - final[0]).abs().max() < 1e-5

    config = Config.from_flat(training_settings(tmp_path / "8", data_path, eod_mask_loss=True))
    samples = build_datasets(
        config, build_tokenizer("CharLevelTokenizer"), 32, (48, 0, 0), None
    ).train
    assert len({int(samples[index]["loss_mask"].sum()) for index in range(48)}) > 1


def test_a_validation_that_the_exit_prevented_follows(tmp_path, data_path, capsys):
    expected = metrics(trained(tmp_path / "uninterrupted", data_path), "validation/loss")
    capsys.readouterr()
    trained(tmp_path / "stopped", data_path, exit_interval=3, save_interval=100)
    output = capsys.readouterr().out
    assert "exiting after iteration 3: exit-interval 3; checkpoint saved" in output
    assert "validation at" not in output
    assert saved_iterations(tmp_path / "stopped/checkpoints") == [3]
    trained(tmp_path / "stopped", data_path)
    assert metrics(tmp_path / "stopped", "validation/loss") == expected
    assert list(expected) == [3, 6]


@pytest.mark.parametrize("cause", ["learning rate", "weights of the checkpoint"])
def test_a_loss_that_is_not_finite_stops_the_run(cause, tmp_path, data_path):
    trained(tmp_path, data_path, train_iters=3)
    if cause == "weights of the checkpoint":
        file = tmp_path / "checkpoints" / "global_step3" / "layer_06-model_00-model_states.pt"
        state = torch.load(file, weights_only=True)
        state["final_linear.weight"][7, 7] = float("nan")
        torch.save(state, file)
        write_manifest_of_folder(file.parent, 3)
    keys = EXPLODE if cause == "learning rate" else {}
    with pytest.raises(UserError, match=r"not finite.*iteration \d+.*last checkpoint"):
        trained(tmp_path, data_path, train_iters=9, log_interval=100, **keys)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "global_step3"
    assert saved_iterations(tmp_path / "checkpoints") == [3]


def test_the_self_check_runs_once_before_training(tmp_path, data_path, monkeypatch, capsys):
    """The CPU takes the place of a GPU. Training, validation and checkpoints need no
    further check.
    """
    use_cpu_as_gpu(monkeypatch)
    calls = install_kernels(monkeypatch, chunked_attention)
    trained(tmp_path, data_path, checkpoint_activations=True)
    assert len(calls) > 20
    assert [index for index, q_len in enumerate(calls) if q_len == self_check.Q_LEN] == [0]
    assert capsys.readouterr().out.count("self-check of the fused attention kernels passed") == 1


def test_training_with_kernels_that_fail_their_self_check(tmp_path, data_path, monkeypatch, capsys):
    """The CPU takes the place of a GPU: auto trains with another backend, and fused stops."""
    expected = metrics(trained(tmp_path / "cpu", data_path))
    use_cpu_as_gpu(monkeypatch)
    calls = install_kernels(monkeypatch, lambda call: 2 * chunked_attention(call))
    capsys.readouterr()
    assert metrics(trained(tmp_path / "auto", data_path)) == expected
    output = capsys.readouterr().out
    assert output.count("self-check of the fused attention kernels FAILED (cpu, KerpleLog, ") == 1
    assert "attention: chunked (auto: the fused kernels failed their self-check)" in output
    assert len(calls) == 1
    with pytest.raises(UserError, match=r"attention-backend 'fused'.*self-check"):
        trained(tmp_path / "fused", data_path, attention_backend="fused")


def test_a_positional_method_whose_gradient_is_not_finite_is_named(
    tmp_path, data_path, monkeypatch
):
    """The derivative of (slope * distance)**0.7 at distance 0 is infinite."""

    class PowerOfProduct(KerpleLog):
        def bias(self, distance):
            slope = self.bias_p.abs().view(-1, *[1] * distance.dim())
            return super().bias(distance) - (slope * distance) ** 0.7

    monkeypatch.setitem(registry._METHODS, "power_of_product", PowerOfProduct)
    with pytest.raises(
        UserError, match=r"not finite.* gradient of bias_p of pos_emb power_of_product"
    ) as raised:
        trained(tmp_path, data_path, pos_emb="power_of_product")
    assert "learning rate" not in str(raised.value)


def test_bad_weights_do_not_replace_a_good_checkpoint(tmp_path, data_path):
    """The loss before the update is finite, the loss of the updated weights is not."""
    trained(tmp_path, data_path, train_iters=3)
    with pytest.raises(UserError, match=r"not finite.*last checkpoint"):
        trained(tmp_path, data_path, save_interval=1, keep_last_n_checkpoints=1, **EXPLODE)
    assert saved_iterations(tmp_path / "checkpoints") == [3]
    trained(tmp_path, data_path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"data_path": "nowhere/text_document"}, r"nowhere/text_document.*prepare_data"),
        ({"train_iters": None}, "train-iters"),
        ({"split": "0,1,0"}, "no training documents"),
        ({"train_iters": 0, "load": None}, "train-iters: 0"),
        ({"train_iters": 0, "load": "nowhere"}, "nowhere.*train-iters: 0"),
        ({"padded_vocab_size": 128}, "padded_vocab_size.*128.*512"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "apex": True}}}, "apex"),
    ],
)
def test_unusable_input_is_an_error(keys, message, tmp_path, data_path):
    assert_rejected(message, trained, tmp_path, **{"data_path": data_path, **keys})
    assert not (tmp_path / "checkpoints").exists()


def test_a_missing_train_iters_is_printed_once(as_rank, monkeypatch):
    monkeypatch.setattr(distributed, "initialize", lambda config: None)
    monkeypatch.setattr(distributed, "shutdown", lambda: None)
    for rank in (0, 1):
        as_rank(rank)
        with pytest.raises(UserError, match="train-iters") as caught:
            train(make_config())
        assert caught.value.printed_by_other_rank == (rank == 1)


def test_a_sequence_length_schedule(tmp_path, data_path, capsys):
    """Each step sees the first tokens of the samples it would see without a schedule. Resuming is
    exact, also where the length changes. Validation has seq-length.
    """
    seen: list[torch.Tensor] = []

    def recorded(model, tokens, labels, mask=None):
        seen.append(tokens)
        return forward(model, tokens, labels, mask)

    forward = GPTWithLoss.forward
    keys = {
        "save_interval": 1,
        "pos_emb": "rotary",
        "hidden_dropout": 0.1,
        "gradient_accumulation_steps": 2,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPTWithLoss, "forward", recorded)
        trained(tmp_path / "constant", data_path, **keys, eval_iters=0, save=None)
        trained(tmp_path / "whole", data_path, **keys, curriculum_learning=CURRICULUM)
    for full, short, length in zip(
        seen[:12], seen[12:], [8] * 4 + [16] * 4 + [32] * 4, strict=True
    ):
        assert torch.equal(full[:, :length], short)
    log = capsys.readouterr().out
    assert [line for line in log.splitlines() if line.startswith("curriculum_learning: ")] == [
        f"curriculum_learning: length {length} from iteration {first}"
        for length, first in ((8, 1), (16, 3), (32, 5))
    ]
    assert log.count("| length 32 |") == 3, "two validations and a test"
    tokens = {1: 64, 2: 128, 3: 256, 4: 384, 5: 640, 6: 896}
    assert metrics(tmp_path / "whole", "train/tokens") == tokens
    for start in (3, 4):
        copy_checkpoint(tmp_path / "whole", tmp_path / str(start), start)
        trained(tmp_path / str(start), data_path, **keys, curriculum_learning=CURRICULUM)
        assert metrics(tmp_path / str(start), "train/tokens") == {
            step: n for step, n in tokens.items() if step > start
        }
        expected, resumed = weights(tmp_path / "whole", 6), weights(tmp_path / str(start), 6)
        assert all(torch.equal(resumed[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("zero_stage", "optimizer", "micro_batch"),
    [(0, "Adam", 8), (2, "SGD", 2), (3, "Lion", 4), (1, "Muon", 4)],
)
def test_skipped_fp16_steps_do_not_advance_the_learning_rate(
    zero_stage, optimizer, micro_batch, tmp_path, data_path
):
    """As in DeepSpeed, whose scheduler steps only after an update. Also after a resume, in the
    middle of them.
    """
    keys = {
        "fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1},
        "zero_optimization": {"stage": zero_stage},
        "optimizer": {"type": optimizer, "params": {"lr": 1e-3}},
        "train_micro_batch_size_per_gpu": micro_batch,
        "train_iters": 14,
        "lr_decay_iters": 15,
        "warmup": 0.4,
        "eval_iters": 0,
        "save_interval": None,
    }
    trained(tmp_path / "whole", data_path, **keys)
    rates, skipped = (
        metrics(tmp_path / "whole", f"train/{name}") for name in ("learning_rate", "skipped_steps")
    )
    assert 3 <= skipped[14] <= 10
    schedule = Schedule(1e-3, "cosine", 15, 6.0)
    for iteration, rate in rates.items():
        assert rate == schedule(iteration - 1 - int(skipped.get(iteration - 1, 0)))

    trained(tmp_path / "parts", data_path, **keys, exit_interval=3)
    trained(tmp_path / "parts", data_path, **keys)
    assert metrics(tmp_path / "parts", "train/learning_rate") == rates
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert "jumps" not in (tmp_path / "parts" / "logs" / "train.log").read_text()


@pytest.mark.parametrize(
    ("evaluated_at", "consumed", "expected"), [(6, 20, 8), (6, 5, 0), (4, 20, 20)]
)
def test_validation_at_the_end_repeats_that_of_an_earlier_process(evaluated_at, consumed, expected):
    """On the same samples; those from the first on if eval_iters has been raised since."""
    starts = []
    validator = SimpleNamespace(
        validated_at=None, validate=lambda state: starts.append(state.consumed_valid_samples)
    )
    trainer = SimpleNamespace(
        config=SimpleNamespace(training=SimpleNamespace(eval_iters=3)),
        engine=SimpleNamespace(global_batch=4),
        state=TrainingState(
            iteration=6, evaluated_at=evaluated_at, consumed_valid_samples=consumed
        ),
        validator=validator,
        curves=None,
        last_iteration=0,
    )
    Trainer.evaluate_at_end(trainer)
    assert starts == [expected]


def test_saving_iteration_0_is_not_training_time(tmp_path, data_path, monkeypatch):
    now = [0.0]

    def takes(seconds, function):
        def call(*arguments):
            now[0] += seconds
            return function(*arguments)

        return call

    monkeypatch.setattr("megatron.training.logging.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(Checkpointer, "save", takes(100.0, Checkpointer.save))
    monkeypatch.setattr(Engine, "train_step", takes(2.0, Engine.train_step))
    trained(tmp_path, data_path, train_iters=1, eval_iters=0, extra_save_iters=[0])
    lines = (tmp_path / "logs" / METRICS).read_text().splitlines()
    assert json.loads(lines[0])["train/seconds_per_step"] == 2.0


def test_exit_interval_does_not_replace_iteration_0(tmp_path, data_path):
    """A run that starts from the weights in its own folder saves iteration 0 only if asked to."""
    trained(tmp_path, data_path, train_iters=1, eval_iters=0, extra_save_iters=[0])
    keys = {"train_iters": 2, "eval_iters": 0, "finetune": True, "iteration": 0}
    trained(tmp_path, data_path, exit_interval=2, **keys)
    assert saved_iterations(tmp_path / "checkpoints") == [0, 1, 2]
