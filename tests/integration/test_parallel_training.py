"""Training on two ranks: the losses and weights of one rank, in every parallel layout and across
layouts.
"""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.checkpoint.directory import saved_iterations
from megatron.preparation.indexed_writer import IndexedWriter
from tests.support.language_models import LLAMA
from tests.support.layouts import LAYOUTS, VOCABULARY, assert_same_metrics, slow
from tests.support.ranks import Ranks
from tests.support.runs import copy_checkpoint, metrics, training_settings, unwrapped, weights

# Every layout is saved once and resumed once, in a layout with another kind of parallelism.
RESUMED_IN = [
    ("one", "tensor"),
    ("pipeline", "zero-2"),
    ("zero-1", "pipeline"),
    ("tensor", "zero-3"),
    ("zero-3", "data"),
]
# The softmax ignores a constant, so the exact gradient of some of DAPE's biases is 0. Rounding
# gives about 1e-8, which Adam would turn into steps.
LARGE_EPSILON = {"type": "Adam", "params": {"lr": 0.005, "eps": 1e-6}}
PER_LAYER = {
    "pos_emb": "kerple",
    "pos_emb_options": {"bias": "log + 0.5 power", "parameters": "per-layer"},
}
METHODS = [{"rotary": {"random_range": 128}}, "forgetting"]
MIXED = {
    "pos_emb": "per_layer",
    "pos_emb_options": {"methods": METHODS},
    "sliding_window_width": [7, None],
}
# A group of parameters, those of KERPLE, that one stage of a pipeline does not have.
ONE_STAGE = {
    "pos_emb": "per_layer",
    "pos_emb_options": {"methods": ["kerple_log", "rotary"]},
    "zero_optimization": {"stage": 1},
}
LLAMA_BLOCK = {**LLAMA, "intermediate_size": 3 * 40, "sliding_window_width": 20}
RECOMPUTE = {"checkpoint_activations": True, "checkpoint_num_layers": 1}


@pytest.fixture(scope="module")
def run_in(trained, tmp_path_factory) -> Callable[[str], Path]:
    """run_in(layout): the folder of an uninterrupted run of the default model, trained once."""
    folders: dict[str, Path] = {}

    def run(layout: str) -> Path:
        if layout not in folders:
            folders[layout] = tmp_path_factory.mktemp(layout)
            output = trained(folders[layout], layout)
            assert layout == "one" or "2 ranks on cpu" in output
        return folders[layout]

    return run


def assert_same_weights(folder: Path, expected: Path) -> None:
    tensors, expected_tensors = weights(folder, 6), weights(expected, 6)
    assert tensors.keys() == expected_tensors.keys()
    for name, tensor in expected_tensors.items():
        torch.testing.assert_close(tensors[name], tensor, atol=1e-4, rtol=0, msg=name)


METRICS = (
    "train/loss",
    "train/grad_norm",
    "validation/loss",
    "kernel/bias_p/mean",
    "kernel/bias_a/max",
)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "one"])
def test_two_ranks_train_like_one(layout, run_in):
    assert_same_metrics(run_in(layout), run_in("one"), *METRICS)
    if layout != "tensor":  # whose files contain slices
        assert_same_weights(run_in(layout), run_in("one"))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("keys", "layout", "kernels"),
    [
        slow({"pos_emb": "transformer_xl"}, "zero-3", ()),
        ({"pos_emb": "xpos"}, "tensor", ()),
        ({"eod_mask_loss": True}, "zero-1", ()),
        slow({"eod_mask_loss": True}, "pipeline", ()),
        slow(
            {"pos_emb": "forgetting"},
            "tensor",
            ("kernel/layer_02/gate/mean", "kernel/layer_03/gate/max"),
        ),
        ({"reset_attention_mask": True, **RECOMPUTE}, "pipeline", ("validation/loss",)),
        *(
            slow({"reset_attention_mask": True}, layout, ("validation/loss",))
            for layout in ("tensor", "data", "zero-1", "zero-2", "zero-3")
        ),
        (
            PER_LAYER,
            "tensor",
            ("kernel/layer_02/bias_1_log_a/mean", "kernel/layer_03/bias_2_power_p/max"),
        ),
    ],
)
def test_other_methods_on_two_ranks(keys, layout, kernels, trained, tmp_path):
    trained(tmp_path / "one", "one", **keys)
    trained(tmp_path / "two", layout, **keys)
    assert_same_metrics(
        tmp_path / "two", tmp_path / "one", "train/loss", "train/grad_norm", *kernels
    )
    if layout != "tensor":
        assert_same_weights(tmp_path / "two", tmp_path / "one")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("pos_emb", "layout"),
    [
        ("kerple_log", "zero-3"),
        slow("dape_kerple", "zero-3"),
        slow("kerple_log", "tensor"),
    ],
)
def test_evaluation_before_the_first_step(pos_emb, layout, trained, tmp_path):
    """A run that stopped at a multiple of eval-interval resumes with the validation that it
    skipped.
    """
    trained(tmp_path / "one", "one", pos_emb=pos_emb)
    trained(tmp_path / "two", layout, pos_emb=pos_emb, exit_interval=3)
    trained(tmp_path / "two", layout, pos_emb=pos_emb)
    assert_same_metrics(tmp_path / "two", tmp_path / "one", "train/loss", "validation/loss")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("layout", "target"),
    [
        ("tensor", "pipeline"),
        *(
            slow(*layouts)
            for layouts in (
                ("pipeline", "one"),
                ("zero-1", "tensor"),
                ("zero-3", "zero-2"),
                ("zero-2", "zero-3"),
            )
        ),
    ],
)
def test_llama_style_blocks_on_two_ranks(layout, target, trained, tmp_path):
    """With a sliding window, a norm of queries and keys, and a key head for two query heads; then
    resumed in another layout.
    """
    trained(tmp_path / "one", "one", **LLAMA_BLOCK)
    trained(tmp_path / "two", layout, **LLAMA_BLOCK)
    assert_same_metrics(tmp_path / "two", tmp_path / "one", *METRICS)
    copy_checkpoint(tmp_path / "two", tmp_path / "resumed", 3)
    trained(tmp_path / "resumed", target, **LLAMA_BLOCK)
    assert_same_metrics(tmp_path / "resumed", tmp_path / "one", *METRICS, after=3)
    if "tensor" not in (layout, target):
        assert_same_weights(tmp_path / "resumed", tmp_path / "one")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("keys", "kernels"),
    [
        ({"pos_emb": "dape_kerple", "optimizer": LARGE_EPSILON}, ("bias_p", "bias_a")),
        slow(PER_LAYER, ("bias_1_log_a", "bias_2_power_p")),
        ({**MIXED, **RECOMPUTE}, ()),
        (ONE_STAGE, ()),
    ],
    ids=[
        "dape_kerple",
        "kerple per layer",
        "random rotary with windows and forgetting",
        "one stage",
    ],
)
def test_methods_with_parameters_per_layer_in_a_pipeline(keys, kernels, trained, tmp_path):
    """Each layer has its own parameters, and random positions are the same on both stages. Resuming
    is exact.
    """
    trained(tmp_path / "one", "one", **keys)
    trained(tmp_path / "two", "pipeline", **keys)
    copy_checkpoint(tmp_path / "two", tmp_path / "resumed", 3)
    trained(tmp_path / "resumed", "pipeline", **keys)
    names = [f"kernel/layer_{layer:02d}/{name}/mean" for layer in (2, 3) for name in kernels]
    assert_same_metrics(
        tmp_path / "two",
        tmp_path / "one",
        "train/loss",
        "train/grad_norm",
        "validation/loss",
        *names,
    )
    assert_same_weights(tmp_path / "two", tmp_path / "one")
    for name in ("train/loss", "train/grad_norm", "validation/loss", *names):
        expected = {
            step: value for step, value in metrics(tmp_path / "two", name).items() if step > 3
        }
        assert metrics(tmp_path / "resumed", name) == expected, name


def test_a_pipeline_in_bfloat16(trained, tmp_path):
    """All parameters get the gradients of all micro-batches, the output layer (which is part of the
    loss) too.
    """
    keys = {"precision": "bfloat16", "eval_iters": 0, "save": None, "load": None, "train_iters": 3}
    trained(tmp_path / "one", "one", **keys)
    output = trained(tmp_path / "two", "pipeline", **keys)
    assert "2 ranks on cpu" in output
    assert "stage=0" not in output  # printed by DeepSpeed
    assert "iter time" not in output
    for name, tolerance in (("train/loss", 0.005), ("train/grad_norm", 0.02)):
        assert metrics(tmp_path / "two", name) == pytest.approx(
            metrics(tmp_path / "one", name), rel=tolerance
        )


@pytest.mark.ci
def test_a_float32_checkpoint_with_tied_weights_resumes_in_a_bfloat16_pipeline(trained, tmp_path):
    keys = {"no_weight_tying": False}
    trained(tmp_path / "first", "one", train_iters=3, **keys)
    for folder, layout in (("one", "one"), ("two", "pipeline")):
        copy_checkpoint(tmp_path / "first", tmp_path / folder, 3)
        trained(tmp_path / folder, layout, precision="bfloat16", **keys)
    assert metrics(tmp_path / "two") == pytest.approx(metrics(tmp_path / "one"), rel=0.005)


@pytest.mark.ci
def test_parameters_on_two_stages_stay_equal(trained, tmp_path):
    """The shared kernel parameters and the tied embedding have a copy on each stage of the
    pipeline.
    """
    trained(tmp_path / "one", "one", no_weight_tying=False)
    trained(tmp_path / "two", "pipeline", no_weight_tying=False)
    assert_same_metrics(tmp_path / "two", tmp_path / "one", "train/loss")
    before, after = weights(tmp_path / "two", 3), weights(tmp_path / "two", 6)
    for parameter in ("bias_p", "bias_a"):
        copies = [
            tensor for name, tensor in after.items() if name.endswith(f"attention.rpe.{parameter}")
        ]
        assert len(copies) == 2
        assert torch.equal(*copies)
    name = "layer_02-model_00-model_states.pt/attention.rpe.bias_p"
    assert not torch.equal(before[name], after[name])
    assert not any("final_linear" in name for name in after)


@pytest.mark.parametrize(
    ("layout", "precision"),
    [slow("pipeline", "fp32"), ("tensor", "bfloat16"), slow("zero-2", "bfloat16")],
)
def test_parameters_stay_within_their_bounds(layout, precision, trained, tmp_path):
    """On every rank, with steps of 0.8: the weights, and the fragments of the fp32
    master weights.
    """
    keys = {
        "pos_emb": "kerple_power",
        "precision": precision,
        "optimizer": {"type": "Adam", "params": {"lr": 0.8}},
    }
    trained(tmp_path, layout, **keys, warmup=0.0, train_iters=4, save_interval=4)
    for name, high in (("bias_a", float("inf")), ("bias_p", 2.0)):
        values = [
            tensor
            for key, tensor in weights(tmp_path, 4).items()
            if key.endswith(f"attention.rpe.{name}")
        ]
        for file in (tmp_path / "checkpoints/global_step4").glob("optimizer_rank_*.pt"):
            entry = torch.load(file, weights_only=True)["parameters"].get(f"positional.{name}", {})
            values += [entry["master"]] if "master" in entry else []
        assert len(values) >= 2
        assert all(((value >= 0.01 - 1e-9) & (value <= high)).all() for value in values)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("pos_emb", "options", "parameter"),
    [
        ("kerple_log", {}, "bias_a"),
        slow("rpe", {"num_buckets": 8, "max_distance": 20}, "weight"),
    ],
)
def test_gradients_of_the_fused_kernels_with_tensor_parallelism(
    pos_emb, options, parameter, trained, tmp_path
):
    """Each rank adds the gradients of its own heads."""
    keys = {
        "pos_emb": pos_emb,
        "pos_emb_options": options,
        "train_batch_size": 1,
        "train_iters": 2,
        "eval_interval": 2,
        "save_interval": 1,
        # Steps proportional to the gradient: Adam's usual ones would hide a wrong factor.
        "optimizer": {"type": "Adam", "params": {"lr": 1.0, "eps": 1.0}},
    }
    trained(tmp_path / "one", "one", **keys)
    assert "fused (as configured)" in trained(
        tmp_path / "two", "tensor", **keys, attention_backend="fused"
    )
    name = f"layer_02-model_00-model_states.pt/attention.rpe.{parameter}"
    steps = [
        weights(tmp_path / run, 2)[name] - weights(tmp_path / run, 1)[name]
        for run in ("one", "two")
    ]
    assert steps[0].flatten().count_nonzero() > steps[0].numel() / 2
    torch.testing.assert_close(*steps, rtol=1e-3, atol=1e-7)
    norms = [metrics(tmp_path / run, "train/grad_norm") for run in ("one", "two")]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("layout", "kernel_devices"),
    [("tensor", []), slow("tensor", ["cpu"]), slow("pipeline", []), ("zero-3", [])],
)
def test_chunked_loss_on_two_ranks(layout, kernel_devices, ranks, trained, data_path, tmp_path):
    """In every layout that accesses the output weights in a different way; with slices also by the
    Triton kernel.
    """
    keys = {
        "padded_vocab_size": VOCABULARY,
        "save": None,
        "load": None,
        "no_weight_tying": layout != "pipeline",
    }
    keys |= {"train_iters": 2, "eval_interval": 2}
    trained(tmp_path / "one", "one", **keys)
    constants = {
        "megatron.model.gpt:mean_loss": None,  # fails if it is called with the complete logits
        "megatron.model.loss:CHUNK_ELEMENTS": VOCABULARY * 5,
        "megatron.model.loss:KERNEL_DEVICES": kernel_devices,
    }
    ranks.train(
        training_settings(tmp_path / "two", data_path, **{**LAYOUTS[layout], **keys}), constants
    )
    names = ("train/loss", "train/grad_norm", "validation/loss", "kernel/bias_p/mean")
    assert_same_metrics(tmp_path / "two", tmp_path / "one", *names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "block"),
    [
        ("tensor", {}),
        ("tensor", LLAMA_BLOCK),
        ("pipeline", {"train_batch_size": 2}),  # two micro-batches
    ],
)
def test_fused_blocks_on_two_ranks(layout, block, ranks, trained, data_path, tmp_path):
    """The Triton kernels of `fused_block.py`, in Triton's interpreter. The norm depends on every
    gradient.
    """
    keys = {
        "train_batch_size": 1,
        "train_iters": 2,
        "log_interval": 1,
        "eval_iters": 0,
        "save": None,
        "load": None,
    }
    keys |= block
    trained(tmp_path / "one", "one", **keys)
    constants = {"megatron.model.fused_block:KERNEL_DEVICES": ["cpu"]}
    ranks.train(
        training_settings(tmp_path / "two", data_path, **{**LAYOUTS[layout], **keys}), constants
    )
    assert_same_metrics(tmp_path / "two", tmp_path / "one", "train/loss", "train/grad_norm")


@pytest.mark.parametrize("layout", ["tensor", *(slow(layout) for layout in ("pipeline", "zero-2"))])
def test_resuming_in_the_same_layout_is_exact(layout, run_in, trained, tmp_path):
    copy_checkpoint(run_in(layout), tmp_path, 3)
    assert "iteration 3" in trained(tmp_path, layout)
    for name in ("train/loss", "validation/loss"):
        assert metrics(tmp_path, name) == {
            s: v for s, v in metrics(run_in(layout), name).items() if s > 3
        }
    expected, resumed = weights(run_in(layout), 6), weights(tmp_path, 6)
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("source", "target"),
    [
        *RESUMED_IN,
        *(slow(*pair) for pair in itertools.product(LAYOUTS, LAYOUTS) if pair not in RESUMED_IN),
    ],
)
@pytest.mark.quick(2)
def test_resuming_in_another_layout(source, target, run_in, trained, tmp_path):
    copy_checkpoint(run_in(source), tmp_path, 3)
    output = trained(
        tmp_path, target, padded_vocab_size=None, make_vocab_size_divisible_by=512
    )  # not 1,024 for tensor
    assert ("vocabulary padded to 512 as in" in unwrapped(output)) == (target == "tensor")
    assert target == "one" or source == target or "resharding its state" in unwrapped(output)
    assert_same_metrics(tmp_path, run_in("one"), *METRICS, after=3)


@pytest.mark.ci
@pytest.mark.parametrize(("layout", "resumed_in"), [("data", "pipeline"), slow("pipeline", "data")])
def test_a_sequence_length_schedule_on_two_ranks(layout, resumed_in, trained, tmp_path):
    """Like on one rank, with validation at another length between two lengths; also resumed in
    another layout.
    """
    schedule = {"difficulty": [8, 16, 32], "max_step": [2, 4]}
    lengths = {
        "enabled": True,
        "min_difficulty": 8,
        "max_difficulty": 32,
        "schedule_type": "fixed_discrete",
    }
    keys = {"curriculum_learning": {**lengths, "schedule_config": schedule}, "seq_length_val": 24}
    trained(tmp_path / "one", "one", **keys)
    trained(tmp_path / "two", layout, **keys)
    names = ("train/loss", "train/grad_norm", "train/tokens", "validation/loss")
    assert_same_metrics(tmp_path / "two", tmp_path / "one", *names)
    copy_checkpoint(tmp_path / "two", tmp_path / "resumed", 3)
    trained(tmp_path / "resumed", resumed_in, **keys)
    assert_same_metrics(tmp_path / "resumed", tmp_path / "one", *names, after=3)


@pytest.mark.slow
def test_zero_3_gathers_small_parameters(trained, run_in, tmp_path):
    """By default ZeRO 3 does not partition parameters of a few elements. With a threshold of 0 it
    does.
    """
    keys = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    trained(tmp_path, "zero-3", **keys)
    assert_same_metrics(
        tmp_path, run_in("one"), "train/loss", "kernel/bias_p/mean", "kernel/bias_a/max"
    )
    expected, gathered = weights(run_in("one"), 6), weights(tmp_path, 6)
    assert expected.keys() == gathered.keys()
    assert all(
        torch.allclose(gathered[name], tensor, atol=1e-3) for name, tensor in expected.items()
    )


@pytest.mark.ci
def test_extrapolation_curves_share_the_text(trained, tmp_path):
    """With an odd number of segments of the longest length, and with one segment, which leaves a
    rank without work.
    """
    lengths = [16, 32, 128]
    keys = {"train_iters": 3, "save": None, "load": None, "extrapolation_lengths": lengths}
    trained(tmp_path / "one", "one", **keys, extrapolation_tokens=896)
    output = trained(tmp_path / "two", "zero-2", **keys, extrapolation_tokens=896)
    assert "on the same 896 tokens at every length" in unwrapped(output)
    trained(tmp_path / "short", "data", **keys, extrapolation_tokens=128)
    for length in lengths:
        name = f"extrapolation/loss/{length}"
        expected = metrics(tmp_path / "one", name)
        assert list(expected) == [3]
        assert metrics(tmp_path / "two", name) == pytest.approx(expected, abs=1e-5)
        assert metrics(tmp_path / "short", name)[3] == pytest.approx(expected[3], rel=0.2)


def test_a_signal_to_one_rank_stops_all(ranks, data_path, tmp_path):
    settings = training_settings(
        tmp_path, data_path, train_iters=100_000, save_interval=None, **LAYOUTS["data"]
    )
    output = ranks.train({**settings, "eval_interval": 50_000}, stop_last_rank_at="iteration 5/")
    assert "received a signal to stop; checkpoint saved" in unwrapped(output)
    assert "validation at" not in output
    (iteration,) = saved_iterations(tmp_path / "checkpoints")
    assert 5 <= iteration < 100_000


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"num_layers": 3, "num_gpus": 3, "pipe_parallel_size": 3},
            r"2 process.*pipe_parallel_size 3",
        ),
        (
            {"pipe_parallel_size": 2, "pipe_partition_method": "type:attention"},
            "error: pipe_partition_method type:att",
        ),
    ],
)
def test_pipelines_that_cannot_be_built(keys, message, ranks, data_path, tmp_path):
    with pytest.raises(AssertionError, match=message):
        ranks.train(training_settings(tmp_path, data_path, **keys))


# A module that a rank imports before it trains; it writes a line for each sample that the rank
# reads.
RECORDER = """
import os
from pathlib import Path
from kerple.positional import KerpleLog, register
from megatron.data.loader import Loader

@register("recorded_kerple_log")
class Recorded(KerpleLog):
    pass

batches = Loader._batches

def recorded(loader):
    path = Path(__file__).with_name(f"read-{os.environ['WORLD_SIZE']}-{os.environ['RANK']}")
    for batch in batches(loader):
        with open(path, "a") as stream:
            stream.writelines(f"{row.tolist()}\\n" for row in batch["tokens"])
        yield batch

Loader._batches = recorded
"""


@pytest.mark.ci
@pytest.mark.parametrize("zero_stage", [0, slow(1), slow(2), slow(3)])
def test_no_sample_is_read_by_two_ranks(fork_server, tmp_path, zero_stage):
    """Three ranks, then two that resume, read 7 batches of 6 of an epoch of 40 samples."""
    ids = np.random.default_rng(3).integers(1, 256, 40 * 32 + 18).astype(np.uint16)
    with IndexedWriter(tmp_path / "numbers", VOCABULARY) as writer:
        writer.add(ids, np.array([500, 7, len(ids) - 507]))
        writer.finish()
    (tmp_path / "recorder.py").write_text(RECORDER)
    keys = {
        "split": "1,0,0",
        "eval_iters": 0,
        "padded_vocab_size": VOCABULARY,
        "save_interval": 4,
        "train_iters": 7,
    }
    keys |= {
        "train_batch_size": 6,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": zero_stage},
    }
    keys |= {"pos_emb": "recorded_kerple_log", "pos_emb_module": str(tmp_path / "recorder.py")}
    settings = training_settings(tmp_path, str(tmp_path / "numbers"), **keys)
    Ranks(fork_server, 3).train({**settings, "num_gpus": 3, "exit_interval": 4})
    Ranks(fork_server, 2).train({**settings, "num_gpus": 2})

    # Each of the 40 samples once, and two again, because an epoch ends within the last batch.
    read = []
    for ranks, batches in ((3, 4), (2, 3)):
        for rank in range(ranks):
            rows = (tmp_path / f"read-{ranks}-{rank}").read_text().splitlines()
            read += rows[: batches * 6 // ranks]
    assert len(read) == 42
    assert len(set(read)) == 40
    assert len(set(read[: 4 * 6])) == 4 * 6
