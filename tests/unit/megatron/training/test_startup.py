"""Checks before anything is built: folders, the lock, and the machine."""

import contextlib
import dataclasses
import os

import pytest

from megatron.checkpoint.directory import saved_iterations
from megatron.config import Config, UserError
from megatron.model.settings import Layout
from megatron.training import loop, startup
from megatron.training.loop import train
from megatron.training.startup import check_machine, check_number_of_samples, estimate
from megatron.utils.processes import Lock
from tests.support.layouts import ONE_RANK as LAYOUT
from tests.support.runs import metrics, training_settings


@pytest.fixture
def nothing_is_built(monkeypatch):
    """Building the datasets or the model fails the test."""
    for name in ("build_datasets", "build_engine"):
        monkeypatch.setattr(loop, name, lambda *_, name=name: pytest.fail(f"{name} was called"))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("save", "save.*file/x"),
        ("log_dir", "log-dir.*file/x"),
        ("tensorboard_dir", "tensorboard-dir.*file/x"),
        ("eval_results_prefix", "eval-results-prefix.*file/x"),
    ],
)
def test_a_folder_that_is_not_writable(key, message, tmp_path, data_path, nothing_is_built):
    (tmp_path / "file").write_text("a file")
    with pytest.raises(UserError, match=message):
        train(Config.from_flat(training_settings(tmp_path, data_path, **{key: str(tmp_path / "file" / "x")})))


def test_the_disk_of_the_log_is_full(tmp_path, data_path, nothing_is_built):
    """A line that is written before the check would fail without the name of the key."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "train.log").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"log-dir.*logs/train\.log"):
        train(Config.from_flat(training_settings(tmp_path, data_path)))


def test_the_folder_of_wandb_is_not_writable(tmp_path, data_path, nothing_is_built, monkeypatch):
    """Otherwise, wandb would write to the system's temporary folder."""
    (tmp_path / "file").write_text("a file")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"use_wandb.*WANDB_DIR"):
        train(Config.from_flat(training_settings(tmp_path, data_path, use_wandb=True)))


def test_a_cache_folder_that_is_not_writable(tmp_path, data_path, monkeypatch):
    """The sample indices are written before the model is built."""
    monkeypatch.setattr(loop, "build_engine", lambda *_: pytest.fail("the model was built"))
    (tmp_path / "file").write_text("a file")
    with pytest.raises(UserError, match=r"file/x.*data-cache-path"):
        train(Config.from_flat(training_settings(tmp_path, data_path, data_cache_path=str(tmp_path / "file" / "x"))))


def test_two_runs_cannot_save_to_the_same_folder(tmp_path, data_path, nothing_is_built):
    settings = training_settings(tmp_path, data_path)
    with Lock(tmp_path / "checkpoints" / "run.lock", "held"):
        with pytest.raises(UserError, match=r"save: .*checkpoints; .*\(held by process \d+ on "):
            train(Config.from_flat(settings))
        assert not (tmp_path / "logs" / "metrics.jsonl").exists()
        # A run that only evaluates needs no lock.
        with pytest.raises(UserError, match="contains no checkpoint"):
            train(Config.from_flat({**settings, "train_iters": 0}))


@pytest.mark.parametrize("key", ["log_dir", "tensorboard_dir"])
def test_two_runs_cannot_log_to_the_same_folder(key, tmp_path, data_path, nothing_is_built):
    config = Config.from_flat(training_settings(tmp_path, data_path, **{key: str(tmp_path / "shared")}))
    message = rf"{key.replace('_', '-')}: .*shared.*process {os.getpid()}"
    with Lock(tmp_path / "shared" / "log.lock", "held"), pytest.raises(UserError, match=message):
        train(config)
    assert not (tmp_path / "checkpoints").exists()


def test_one_folder_in_two_spellings(tmp_path, data_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    keys = {"log_dir": str(tmp_path / "logs"), "tensorboard_dir": "other/../logs", "train_iters": 1, "eval_iters": 0}
    train(Config.from_flat(training_settings(tmp_path, data_path, **keys)))
    assert list(metrics(tmp_path)) == [1]
    assert list((tmp_path / "logs").glob("events.*"))


def test_a_finished_run_removes_what_a_killed_one_left(tmp_path, data_path):
    settings = training_settings(tmp_path, data_path, train_iters=1, eval_iters=0)
    train(Config.from_flat(settings))
    expected = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    for name in (".global_step0.deleted", "global_step2.unfinished"):
        (tmp_path / "checkpoints" / name).mkdir()
    train(Config.from_flat(settings))
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == expected


def test_the_lock_is_released_after_success_and_failure(tmp_path, data_path):
    train(Config.from_flat(training_settings(tmp_path, data_path)))
    assert not (tmp_path / "checkpoints" / "run.lock").exists()
    keys = {"optimizer": {"type": "Adam", "params": {"lr": 1e20}}, "warmup": 0.0, "gradient_clipping": 0.0}
    with pytest.raises(UserError, match="not finite"):
        train(Config.from_flat(training_settings(tmp_path / "failed", data_path, **keys)))
    assert not (tmp_path / "failed" / "checkpoints").exists()


def test_a_run_whose_lock_file_was_removed_saves_nothing_more(tmp_path, data_path, monkeypatch):
    path = tmp_path / "checkpoints" / "run.lock"
    step = loop.Engine.train_step

    def with_another_run(engine, batches, learning_rate, iteration):
        if iteration == 4:
            path.unlink()
            other.acquire()
        return step(engine, batches, learning_rate, iteration)

    monkeypatch.setattr(loop.Engine, "train_step", with_another_run)
    other = Lock(path, "busy")
    with pytest.raises(UserError, match=r"run\.lock"):
        train(Config.from_flat(training_settings(tmp_path, data_path)))
    assert saved_iterations(tmp_path / "checkpoints") == [3]
    other.check()
    other.release()
    monkeypatch.undo()
    train(Config.from_flat(training_settings(tmp_path, data_path)))
    assert saved_iterations(tmp_path / "checkpoints") == [3, 6]


def test_all_hosts_must_share_the_folder(tmp_path, monkeypatch):
    with contextlib.ExitStack() as resources:
        startup.lock_save_folder(str(tmp_path), resources)
        assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]

    def on_a_host_with_a_folder_of_its_own(check):
        for path in tmp_path.iterdir():
            path.unlink()
        check()

    monkeypatch.setattr(startup, "run_on_all_ranks", on_a_host_with_a_folder_of_its_own)
    with (
        contextlib.ExitStack() as resources,
        pytest.raises(UserError, match="rank 0"),
    ):
        startup.lock_save_folder(str(tmp_path), resources)


@pytest.fixture(autouse=True)
def sixteen_gigabytes(monkeypatch):
    monkeypatch.setattr(startup, "free_memory", lambda device="cpu": 16 * 10**9)


def check(tmp_path, layout: Layout = LAYOUT, vocab_size: int = 512, **keys: object) -> None:
    config = Config.from_flat(training_settings(tmp_path, "data", **keys))
    check_machine(config, layout, vocab_size, lambda line: None, force=False)


@pytest.mark.parametrize("keys", [{}, {"pos_emb": "learned", "attention_backend": "sdpa"}])
def test_small_models_fit(tmp_path, keys, monkeypatch):
    check(tmp_path, **keys)
    monkeypatch.setattr(startup, "free_memory", lambda device="cpu": 10**5)
    with pytest.raises(UserError, match="per rank"):
        check(tmp_path, **keys)


@pytest.mark.parametrize(
    ("keys", "vocab_size", "message"),
    [
        # 2 * 10^9 * 32 parameters: 4 bytes, 4 bytes, 8 bytes
        ({}, 10**9, r"1,024\.0.*16\.0.*256\.0.*512\.0.*64,000.*64,000,000,000"),
        ({"pos_emb": "learned", "max_position_embeddings": 2**31}, 512, "68,719,476,736"),
        ({"train_batch_size": 10**9}, 512, "train_micro_batch_size_per_gpu"),
        ({"seq_length_val": 10**12}, 512, "activations"),
        ({"attention_backend": "flex"}, 512, "\"attention_backend\".*'flex'.*CPU"),
        ({"attention_backend": "fused"}, 512, "\"attention_backend\".*'fused'"),
    ],
)
def test_what_does_not_fit(tmp_path, keys, vocab_size, message, monkeypatch):
    monkeypatch.setattr("kerple.attention.backends.triton.launch._load_kernels", lambda: None)
    with pytest.raises(UserError, match=message):
        check(tmp_path, vocab_size=vocab_size, **keys)


def test_ranks_share_the_model(tmp_path):
    keys = {"hidden_size": 2**14, "num_layers": 8, "train_batch_size": 1}  # 8 * 12 * 2^28 parameters
    with pytest.raises(UserError, match="per rank"):
        check(tmp_path, **keys)
    check(tmp_path, dataclasses.replace(LAYOUT, world_size=64, pipeline_size=8, tensor_size=8), **keys)


def test_the_index_of_samples_must_fit():
    check_number_of_samples(10**9)
    with pytest.raises(UserError, match=r"2,000,000,000.*24\.0"):
        check_number_of_samples(2 * 10**9)


# The small model has 2 * 512 * 32 elements in embeddings and 2 * 12 * 32^2 in blocks.
EMBEDDINGS, BLOCKS = 32_768, 24_576
ELEMENTS = EMBEDDINGS + BLOCKS


@pytest.mark.parametrize(
    ("keys", "replicas", "weights", "gradients", "optimizer"),
    [
        ({}, 1, 4 * ELEMENTS, 4 * ELEMENTS, 8 * ELEMENTS),
        ({"no_weight_tying": False}, 1, 4 * (ELEMENTS - 16_384), 4 * (ELEMENTS - 16_384), 8 * (ELEMENTS - 16_384)),
        ({"activation": "swiglu", "intermediate_size": 192}, 1, 4 * (ELEMENTS - 4_096), None, None),
        ({"optimizer": {"type": "SGD"}}, 1, 4 * ELEMENTS, 4 * ELEMENTS, 0),
        ({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, 1, None, None, 4 * ELEMENTS),
        ({"optimizer": {"type": "Lion"}}, 1, None, None, 4 * ELEMENTS),
        ({"optimizer": {"type": "Muon"}}, 1, None, None, 4 * (2 * EMBEDDINGS + BLOCKS)),
        # ZeRO has fp32 master weights (4 bytes) besides Adam's states (8 bytes).
        ({"zero_optimization": {"stage": 1}}, 2, 4 * ELEMENTS, 4 * ELEMENTS, 6 * ELEMENTS),
        ({"zero_optimization": {"stage": 2}}, 2, 4 * ELEMENTS, 2 * ELEMENTS, 6 * ELEMENTS),
        ({"zero_optimization": {"stage": 3}}, 2, 2 * ELEMENTS, 2 * ELEMENTS, 6 * ELEMENTS),
        ({"precision": "bfloat16"}, 1, 2 * ELEMENTS, 4 * ELEMENTS, 12 * ELEMENTS),
        ({"precision": "fp16"}, 2, 2 * ELEMENTS, 2 * ELEMENTS, 6 * ELEMENTS),
        ({"precision": "bfloat16", "zero_optimization": {"stage": 3}}, 4, ELEMENTS / 2, ELEMENTS / 2, 3 * ELEMENTS),
        ({"train_iters": 0}, 1, 4 * ELEMENTS, 0, 0),
    ],
)
def test_weights_gradients_and_optimizer(tmp_path, keys, replicas, weights, gradients, optimizer):
    config = Config.from_flat(training_settings(tmp_path, "data", **keys))
    memory = estimate(config, dataclasses.replace(LAYOUT, world_size=replicas, data_size=replicas), 512)
    for expected, value in ((weights, memory.weights), (gradients, memory.gradients), (optimizer, memory.optimizer)):
        assert expected in (None, value)


TOKENS, HIDDEN = 8 * 32, 32
LOGITS = 4 * TOKENS * 512  # bytes; not in chunks on a CPU


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # Equation 2 of Korthikanti et al. without dropout masks and scores: 32 s b h bytes per layer (16 bit).
        ({}, 2 * 64 * TOKENS * HIDDEN + LOGITS),
        ({"precision": "bfloat16"}, (2 * 64 * TOKENS * HIDDEN + LOGITS) / 2),
        ({"attention_backend": "reference"}, 2 * 64 * TOKENS * HIDDEN + 2 * 4 * 8 * 4 * 32**2 + LOGITS),
        ({"checkpoint_activations": True}, (2 * 4 + 64) * TOKENS * HIDDEN + LOGITS),
        ({"train_micro_batch_size_per_gpu": 2}, (2 * 64 * TOKENS * HIDDEN + LOGITS) / 4),
    ],
)
def test_activations(tmp_path, keys, expected):
    config = Config.from_flat(training_settings(tmp_path, "data", **keys))
    assert estimate(config, LAYOUT, 512).activations == expected


def test_tensor_parallel_activations(tmp_path):
    """Equation 2: 8 + 24 / t bytes in half precision, without dropout masks."""
    config = Config.from_flat(training_settings(tmp_path, "data"))
    layout = dataclasses.replace(LAYOUT, world_size=2, tensor_size=2)
    assert estimate(config, layout, 512).activations == 2 * (16 + 48 / 2) * TOKENS * HIDDEN + LOGITS / 2
