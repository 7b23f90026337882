"""Models of this project as models of lm-evaluation-harness."""

import tempfile

import pytest
import torch
from lm_eval.api.instance import Instance
from safetensors import SafetensorError

from megatron.convert import hugging_face
from megatron.evaluation.harness import find_tasks, harness_model
from megatron.tokenizer.tokenizer import TokenizerFiles
from megatron.utils.errors import UserError
from tests.support.conversion import make_model
from tests.support.errors import assert_rejected
from tests.support.harness_tasks import TASKS, write_tasks
from tests.support.texts import PYTHON


def model_of(pos_emb, dtype=torch.float32, **keys):
    options = {
        "mode": "full",
        "dtype": dtype,
        "device": torch.device("cpu"),
        "max_length": 64,
        "batch_size": 2,
    }
    return harness_model(
        *make_model(pos_emb, **keys), TokenizerFiles("CharLevelTokenizer"), **options
    )


def test_a_model_in_half_precision():
    """Log-probabilities are float32."""
    model = model_of("rotary", torch.bfloat16)
    assert {parameter.dtype for parameter in model.model.parameters()} == {torch.bfloat16}
    assert model.model.base_model.rotary_emb.inv_freq.dtype == torch.float32
    assert (model.max_length, model.batch_size, model.prefix_token_id) == (64, 2, 0)
    text = PYTHON[:60]
    tokens = torch.tensor([0, *text.encode()])
    with torch.no_grad():
        log_probabilities = model.model(tokens[None, :-1]).logits[0].double().log_softmax(-1)
    (value,) = model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    assert value == pytest.approx(
        log_probabilities.gather(1, tokens[1:, None]).sum().item(), rel=1e-6
    )


@pytest.mark.parametrize(
    ("pos_emb", "options", "message"),
    [
        (
            "rotary",
            {"scaling": "dynamic", "factor": 4.0},
            "eval_tasks: tasks.*scaling dynamic.*--modes",
        ),
        ("alibi", {"random_range": 64}, "eval_tasks.*export.*random_range"),
    ],
)
def test_models_that_cannot_be_exported(pos_emb, options, message):
    assert_rejected(message, model_of, pos_emb, pos_emb_options=options)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")]
)
def test_a_temporary_folder_that_cannot_be_written(error, monkeypatch, tmp_path):
    def save_file(*_, **__):
        raise error

    message = "eval_tasks.*temporary folder.*{}.*TMPDIR"
    monkeypatch.setattr(hugging_face, "save_file", save_file)
    assert_rejected(message.format("No space left"), model_of, "rotary")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert_rejected(message.format("missing failed: "), model_of, "rotary")


@pytest.mark.ci
def test_own_tasks_are_found_without_the_index_of_the_harness(tmp_path):
    folder = write_tasks(tmp_path)
    (tmp_path / "group.yaml").write_text("group: all\ntask: [pages, hellaswag]\n")
    file = f"{folder}/pages.yaml"
    found = find_tasks([*TASKS, file], [folder])
    assert found["tasks"] == [*sorted(TASKS), file]
    assert "hellaswag" not in found["task_manager"].all_tasks
    for name in ("all", f"{folder}/group.yaml", "page*"):
        assert "hellaswag" in find_tasks([name], [folder])["task_manager"].all_tasks
    with pytest.raises(
        UserError, match=r"eval_tasks hellaswags: unknown task.*hellaswag.*--include-path"
    ):
        find_tasks(["pages", "hellaswags"], [folder])
