"""The runs of a sweep and their state."""

import json
import shutil
from itertools import product

import pytest

from kerple.positional import registry
from megatron.config import UserError
from megatron.data.indexed_dataset import (
    bin_path,
    manifest_path,
    open_indexed_files,
    write_manifest,
)
from megatron.evaluation.records import RESULTS
from megatron.sweep import planning
from megatron.sweep.definition import read_sweep
from megatron.sweep.planning import State, plan
from tests.support.checkpoints import write_corpus
from tests.support.corpora import manifest_of
from tests.support.errors import assert_rejected
from tests.support.runs import ROOT
from tests.support.sweeps import logged_iterations, write_sweep


def test_a_run_has_the_merged_configuration_and_its_own_folders(tmp_path):
    axes = {
        "pos_emb": [
            "kerple_log.yml",
            {"name": "slopes", "files": ["alibi.yml"], "hidden-dropout": 0.1},
        ],
        "length": [{"seq-length": 32, "name": "short"}, {"seq-length": 16, "name": "shorter"}],
        "seed": [{"seed": 1}, {"seed": 2}],
    }
    runs = plan(
        read_sweep(
            write_sweep(tmp_path, axes=axes, set={"optimizer.params.lr": 0.5, "train-iters": 3})
        )
    )
    assert len(runs) == 8
    assert [run.name for run in runs[:3]] == [
        "kerple_log/short/1",
        "kerple_log/short/2",
        "kerple_log/shorter/1",
    ]
    run, config = runs[-1], runs[-1].config
    assert run.name == "slopes/shorter/2"
    assert (config.model.pos_emb, config.model.seq_length, config.training.seed) == ("alibi", 16, 2)
    assert (config.model.hidden_dropout, config.optimizer.lr, run.steps) == (0.1, 0.5, 3)
    folder = tmp_path / "out" / "runs" / "slopes" / "shorter" / "2"
    assert config.checkpoint.save == config.checkpoint.load == str(folder / "checkpoints")
    assert config.logging.log_dir == str(folder / "logs")
    assert run.tokens_per_step == 8 * 16


def test_runs_that_tables_cannot_distinguish_have_labels(tmp_path):
    methods = ["kerple_log.yml", "alibi.yml"]
    rates = [{"optimizer.params.lr": 0.1}, {"optimizer.params.lr": 0.2, "name": "fast"}]
    seeds = [{"seed": 1}, {"seed": 2}]
    runs = plan(
        read_sweep(write_sweep(tmp_path, axes={"pos_emb": methods, "lr": rates, "seed": seeds}))
    )
    labels = ["0.1", "0.1", "fast", "fast"]
    assert [run.evaluation[0][-2:] for run in runs[:4]] == [("--label", label) for label in labels]
    evaluation = [{"label": "mine", "tokens": 128}, {"tokens": 64}]
    runs = plan(
        read_sweep(
            write_sweep(tmp_path, axes={"pos_emb": methods, "lr": rates}, evaluation=evaluation)
        )
    )
    assert [words[-1] for words in runs[1].evaluation] == ["mine, fast", "fast"]
    for axes in (
        {"pos_emb": methods, "seed": seeds},
        {"length": [{"seq-length": 16}, {"seq-length": 32}]},
    ):
        runs = plan(
            read_sweep(
                write_sweep(tmp_path, axes=axes, set={"pos-emb": "alibi"} if len(axes) == 1 else {})
            )
        )
        assert not any("--label" in run.evaluation[0] for run in runs)


OTHER_VALID_DATA = {"train-data-paths": ["text"], "test-data-paths": ["text"]}


@pytest.mark.parametrize(
    ("keys", "labels"),
    [
        # Records have the name of the evaluated corpus, not the training data and the split.
        (
            [{"train-data-paths": [name], "valid-data-paths": ["text_document"]} for name in "ab"],
            {"0", "1"},
        ),
        (
            [{"data-path": "text_document", "split": split} for split in ("2,1,0", "3,1,0")],
            {"0", "1"},
        ),
        ([{"data-path": "a/text_document"}, {"data-path": "b/text_document"}], {"0", "1"}),
        ([{"data-path": "a"}, {"data-path": "b"}], set()),
        ([{"train-data-paths": ["text"], "valid-data-paths": [name]} for name in "ab"], set()),
        ([{**OTHER_VALID_DATA, "valid-data-paths": [name]} for name in "ab"], {"0", "1"}),
    ],
)
def test_labels_of_runs_with_different_data(keys, labels, tmp_path):
    axes = {"data": [{"name": str(index), **choice} for index, choice in enumerate(keys)]}
    evaluation = {"tokens": 128, "split": "test" if "test-data-paths" in keys[0] else "valid"}
    settings = {"pos-emb": "alibi", "data-path": None}
    sweep = write_sweep(tmp_path, axes=axes, set=settings, evaluation=evaluation)
    words = [run.evaluation[0] for run in plan(read_sweep(sweep))]
    assert {options[-1] for options in words if "--label" in options} == labels


OF_RUN = r"sweep\.yml: run kerple_log/7: .*"
HEADS = [{"num-attention-heads": 4}, {"num-attention-heads": 5}]
DATA = [{"name": "web", "train-data-paths": ["web"], "data-path": None}]
SEEDS = [{"seed": 1, "name": "first"}, {"seed": 1, "name": "second"}]
ALIBI = {"pos-emb": "alibi"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"set": {"finetune": True, "load": "pretrained"}}, OF_RUN + "finetune"),
        ({"set": {"iteration": 3, "load": "pretrained"}}, OF_RUN + "iteration"),
        ({"set": {"load": "pretrained"}}, OF_RUN + "pretrained"),
        ({"set": {"train-iters": None}}, OF_RUN + "train_iters"),
        ({"set": {"train-iters": 0}}, OF_RUN + "train_iters"),
        ({"set": {"deepspeed_slurm": True}}, OF_RUN + "deepspeed_slurm"),
        ({"set": {"train_batch_size": None}}, OF_RUN + "train_batch_size"),
        ({"set": {"train-itters": 5}}, OF_RUN + "train-itters"),
        ({"axes": {"heads": HEADS}}, r"sweep\.yml.*5.*num_attention_heads"),
        ({"axes": {"data": DATA}, "set": ALIBI}, "valid-data-paths"),
        ({"axes": {"seed": SEEDS}, "set": ALIBI}, r"sweep\.yml: .*first.*second"),
    ],
)
def test_runs_that_are_rejected(keys, message, tmp_path):
    assert_rejected(message, plan, read_sweep(write_sweep(tmp_path, **keys)))


def test_runs_resume_from_the_folder_that_they_save_to(tmp_path):
    plan(read_sweep(write_sweep(tmp_path, set={"save": "somewhere", "load": "somewhere"})))


def test_keys_that_do_not_change_the_training_do_not_make_another_run(tmp_path):
    axes = {"pos_emb": ["alibi.yml"]}
    (run,) = plan(read_sweep(write_sweep(tmp_path, axes=axes)))
    run.write_config()
    keys = {
        "log-interval": 7,
        "steps_per_print": 3,
        "wandb_group": "sweep",
        "keep-last-n-checkpoints": 2,
    }
    plan(read_sweep(write_sweep(tmp_path, axes=axes, set=keys)))
    with pytest.raises(UserError, match="eval_interval"):
        plan(read_sweep(write_sweep(tmp_path, axes=axes, set={**keys, "eval-interval": 7})))


def test_the_plan_shows_the_state_of_a_run_that_resumes_from_its_last_checkpoint(sweep):
    axes = {"seed": [{"seed": 17, "pos-emb": "alibi", "name": "17"}]}
    output = sweep("--dry-run", axes=axes)
    assert "to train" in output
    sweep(axes=axes, status=1)
    output = sweep("--dry-run", axes=axes)
    assert "to resume from 3" in output
    assert "3 │         768" in output  # 3 steps of 8 x 32 tokens
    sweep(axes=axes)
    assert logged_iterations(sweep.runs / "17") == [1, 2, 3, 4, 5, 6]
    assert any(line.startswith("training from 3") for line in sweep.output_lines("17"))
    assert not (sweep.runs / "17" / "failed.json").exists()


def test_the_progress_of_a_run_with_many_kernel_statistics(tmp_path):
    run = plan(read_sweep(write_sweep(tmp_path)))[0]
    run.metrics.parent.mkdir(parents=True)
    statistics = {f"kernel/layer_{layer}/bias_p/mean": 0.123456789 for layer in range(200)}
    lines = [json.dumps({"iteration": iteration, **statistics}) for iteration in (2, 4)]
    run.metrics.write_text("\n".join([*lines, '{"iteration": 6, "ker']))
    assert run.logged_iteration() == 4


def test_a_run_with_a_damaged_last_checkpoint_is_not_finished(sweep):
    sweep()
    step = sweep.runs / "alibi" / "7" / "checkpoints" / "global_step6"
    record = {"size": 3, "crc32": "00000000"}
    manifest = {"format": 1, "iteration": 6, "checksum": "crc32", "files": {"gone.pt": record}}
    (step / "manifest.json").write_text(json.dumps(manifest))
    output = sweep("--dry-run")
    assert output.count("finished") == 1
    assert "to resume from 6" in output


def test_lost_results_are_measured_again(sweep):
    sweep()
    results = sweep.runs / "alibi" / "7" / "evaluation" / "results.jsonl"
    complete = results.read_text()
    results.write_text("".join(complete.splitlines(keepends=True)[:-1]))
    sweep()
    assert complete.splitlines()[-1] in results.read_text()
    calls = [line.split()[0] for line in sweep.output_lines("alibi/7")]
    assert calls == ["training", "evaluating", "evaluating"]


def test_a_run_that_was_trained_again_is_evaluated_again(sweep):
    sweep()
    shutil.rmtree(sweep.runs / "alibi" / "7" / "checkpoints")
    assert "to train" in sweep("--dry-run")
    sweep()
    assert [line.split()[0] for line in sweep.output_lines("alibi/7")] == [
        "training",
        "evaluating",
    ] * 2
    journal = sweep.runs / "alibi" / "7" / "evaluation" / "evaluated.json"
    assert "2 of them already finished" in sweep()
    # An evaluation by a version that did not store the fingerprint.
    journal.write_text(
        json.dumps({"iteration": 6, "options": json.loads(journal.read_text())["options"]})
    )
    assert sweep("--dry-run").count("to evaluate") == 1


def test_evaluations_of_other_weights_start_again(tmp_path, monkeypatch):
    """The results may be of both calls, before and after the training."""
    axes, lengths = {"pos_emb": ["alibi.yml"]}, [{"lengths": [32]}, {"lengths": [64]}]
    (run,) = plan(read_sweep(write_sweep(tmp_path, axes=axes, evaluation=lengths)))
    for fingerprint in ("first", "second"):
        monkeypatch.setattr(planning, "weights_fingerprint", lambda _, name=fingerprint: name)
        assert run.evaluations_done() == 0
        for number, options in enumerate(run.evaluation, start=1):
            assert run.start_evaluation() == options
            (run.results / RESULTS).touch()
            started = len(json.loads((run.results / "evaluated.json").read_text())["options"])
            assert started == (2 if fingerprint == "second" else number)
            run.mark_evaluated()
            assert run.evaluations_done() == number


def test_a_changed_configuration_is_an_error(sweep):
    sweep()
    assert_rejected("kerple_log/7.*train_iters.*6.*8", sweep, set={"train-iters": 8})
    # Before anything is run, including runs that are new in the file.
    axes = {
        "pos_emb": ["alibi.yml"],
        "seed": [{"seed": 8}, {"seed": 7, "hidden-dropout": 0.1, "name": "7"}],
    }
    assert_rejected(r"alibi/7.*hidden_dropout.*0\.1", sweep, axes=axes)
    assert not (sweep.runs / "alibi" / "8").exists()
    (sweep.runs / "alibi" / "7" / "config.yml").unlink()
    assert_rejected(r"alibi/7.*config\.yml", sweep)


@pytest.mark.parametrize("keys", [{"seed": 8}, {"hidden-dropout": 0.1}, {"train_batch_size": 16}])
def test_exchanged_checkpoints_are_an_error(keys, sweep):
    axes = {"pos_emb": ["alibi.yml"], "seed": [{"seed": 7}, {"seed": 7, **keys, "name": "other"}]}
    sweep(axes=axes)
    own, other = (sweep.runs / "alibi" / name / "checkpoints" for name in ("7", "other"))
    own.rename(sweep.folder / "moved")
    other.rename(own)
    (sweep.folder / "moved").rename(other)
    assert_rejected("alibi/7/checkpoints", sweep, axes=axes)


def build_data_again(prefix, *, manifest):
    """Replace the data by others of the same size; the index, or else the manifest, shows it."""
    if not manifest:
        write_corpus(prefix.parent, documents=50)
        return
    manifest_path(prefix).unlink(missing_ok=True)
    content = bytearray(bin_path(prefix).read_bytes())
    content[0] = (content[0] + 1) % 100
    bin_path(prefix).write_bytes(content)
    write_manifest(prefix, manifest_of(open_indexed_files(str(prefix)), largest_id=1))


@pytest.mark.parametrize("manifest", [False, True])
def test_data_that_were_built_again_are_an_error(manifest, sweep):
    prefix = sweep.folder / "text_document"
    path = write_sweep(
        sweep.folder, axes={"pos_emb": ["alibi.yml"], "seed": [{"seed": 7}, {"seed": 17}]}
    )
    if manifest:
        build_data_again(prefix, manifest=True)
    sweep(write=False, status=1)
    files = {file: file.read_bytes() for file in sweep.folder.glob("text_document.*")}
    build_data_again(prefix, manifest=manifest)
    assert_rejected("alibi/7.*text_document", plan, read_sweep(path))
    for file, content in files.items():
        file.write_bytes(content)
    assert [run.status().state for run in plan(read_sweep(path))] == [State.FINISHED, State.RESUME]
    (sweep.folder / "text_document.json").unlink(
        missing_ok=True
    )  # what both sides know is compared
    plan(read_sweep(path))
    build_data_again(prefix, manifest=manifest)
    for name in ("7", "17"):
        (sweep.runs / "alibi" / name / "data.json").unlink()  # as in runs of earlier versions
    sweep(write=False)
    assert not list(
        sweep.runs.rglob("data.json")
    )  # it is not known which data their training started with


METHOD = """
from kerple.positional import Bias, register


@register("test_slope")
class Slope(Bias):
    def __init__(self, num_heads):
        super().__init__()
        self.num_heads = num_heads

    def bias(self, distance):
        return -0.5 * distance.expand(self.num_heads, *distance.shape)
"""


def test_a_custom_method_that_changed(sweep, monkeypatch):
    """Its finished runs must not stand beside new ones."""
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    path = sweep.folder / "slope.py"
    path.write_text(METHOD)
    mine = {"name": "mine", "pos_emb": "test_slope", "pos_emb_module": str(path)}
    seeds = [{"seed": 7}]
    sweep(axes={"method": ["alibi.yml", mine], "seed": seeds})
    seeds.append({"seed": 9})
    axes = {"method": ["alibi.yml", mine], "seed": seeds}
    path.write_text(METHOD.replace("0.5", "0.25"))
    assert_rejected(rf"mine/7.*{path}", sweep, axes=axes)
    assert not (sweep.runs / "alibi" / "9").exists()
    path.write_text(METHOD)
    assert "4 runs" in sweep(axes=axes)
    path.write_text(METHOD.replace("0.5", "0.25"))
    shutil.rmtree(sweep.runs / "mine")
    sweep(axes=axes)


def test_data_at_a_relative_path(sweep, tmp_path, monkeypatch):
    """What counts are the contents that the sweep finds now, wherever it is started."""
    for name in ("first", "same", "other"):
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name, documents=40 + 10 * (name == "other"))
    monkeypatch.chdir(tmp_path / "first")
    keys = {"set": {"data_path": "text_document"}}
    sweep(**keys)
    monkeypatch.chdir(tmp_path / "same")
    sweep(**keys)
    monkeypatch.chdir(tmp_path / "other")
    assert_rejected(f"text_document.*{tmp_path}/other", sweep, **keys)


def test_a_run_without_a_checkpoint_starts_with_the_new_data(sweep):
    axes = {"pos_emb": ["alibi.yml"], "seed": [{"seed": 13}]}
    sweep(axes=axes, status=1)
    before = (sweep.runs / "alibi" / "13" / "data.json").read_text()
    build_data_again(sweep.folder / "text_document", manifest=False)
    sweep(write=False, status=1)
    assert (sweep.runs / "alibi" / "13" / "data.json").read_text() != before


def test_the_sweep_of_the_kerple_paper(monkeypatch):
    monkeypatch.chdir(ROOT)
    sweep = read_sweep("configs/sweeps/kerple.yml")
    combinations = list(sweep.combinations())
    assert len(combinations) == 8 * 3 * 5
    configs = [sweep.configuration(choices) for choices in combinations[::17]]
    assert {config.training.seed for config in configs} == set(range(1235, 1240))
    assert len({config.model.pos_emb for config in configs}) == 8
    assert len({config.data.data_path for config in configs}) == 3
    assert {config.schedule.train_iters for config in configs} == {50_000}
    assert {(config.batch.resolve(1)[0], config.model.seq_length) for config in configs} == {
        (32, 512)
    }
    (words,) = sweep.evaluation
    arguments = " ".join(words)
    assert "--lengths 512 1024 2048 4096 8192 16384" in arguments
    assert "--modes full window@512" in arguments
    assert arguments.endswith("--by-position")  # for Figures 5 and 7


@pytest.mark.parametrize("path", ["configs/sweeps/demo.yml", "experiments/pictures.yml"])
def test_the_sweeps_of_the_makefile(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    sweep = read_sweep(path)
    configs = [sweep.configuration(choices) for choices in sweep.combinations()]
    assert len({config.model.pos_emb for config in configs}) == len(configs) >= 3
    assert {config.schedule.train_iters for config in configs} == {600}


@pytest.mark.ci
def test_the_sweeps_of_the_replication(monkeypatch):
    monkeypatch.chdir(ROOT)
    factors = set()
    for name, methods in (("c", 10), ("prose", 8), ("latex", 4), ("c-factor1", 1)):
        sweep = read_sweep(f"experiments/replication/{name}.yml")
        runs = plan(sweep)
        assert len(runs) == 3 * methods
        # The first third is a complete table of one seed.
        assert {run.config.training.seed for run in runs[:methods]} == {1235}
        assert len({run.config.model.pos_emb for run in runs[:methods]}) == methods
        factors.add((name, runs[0].config.optimizer.positional_lr_factor))
        full, restricted = [words[: words.index("--by-position")] for words in sweep.evaluation]
        assert full == (
            "--lengths",
            "128",
            "512",
            "1024",
            "2048",
            "4096",
            "8192",
            "--tokens",
            "262144",
        )
        # The same pieces of text in all modes: they depend on the longest length and the number of
        # tokens.
        assert restricted[2] == "8192"
        assert restricted[-2:] == full[-2:]
    assert len({factor for name, factor in factors if name != "c-factor1"}) == 1


def test_the_sweep_with_and_without_document_masks(monkeypatch):
    monkeypatch.chdir(ROOT)
    runs = plan(read_sweep("experiments/replication/documents.yml"))
    settings = [
        (run.config.training.seed, run.config.model.pos_emb, run.config.data.reset_attention_mask)
        for run in runs
    ]
    assert set(settings) == set(product((1235, 1236, 1237), ("kerple_log", "alibi"), (True, False)))
    assert {run.config.data.train_data_paths for run in runs} == {
        ("data/debian_c/pieces_text_document",)
    }
