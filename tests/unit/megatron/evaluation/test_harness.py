"""Models of this project in lm-evaluation-harness, compared with the harness's own models of their exports."""

import pytest
import torch
from lm_eval.api.instance import Instance

from kerple.attention import parse_mode
from megatron.convert import to_hugging_face
from megatron.evaluation.harness import HarnessModel, evaluate_tasks
from megatron.inference import load_model
from megatron.inference.generation import generate
from megatron.tokenizer.tokenizer import CharLevelTokenizer, TokenizerFiles, build_tokenizer
from megatron.utils.errors import UserError
from tests.support.checkpoints import TRAIN_LENGTH
from tests.support.conversion import quiet
from tests.support.harness_tasks import TASKS, use_offline_harness, write_ascii_checkpoint, write_tasks
from tests.support.language_models import small_gpt
from tests.support.texts import PYTHON


@pytest.fixture(autouse=True)
def _offline(tmp_path_factory, monkeypatch):
    use_offline_harness(monkeypatch, tmp_path_factory.mktemp("datasets"))


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Method -> (model, tokenizer)."""
    models = {}
    for method in ("kerple_log", "learned"):
        folder = tmp_path_factory.mktemp(method)
        write_ascii_checkpoint(folder, method)
        model, config = load_model(folder)
        models[method] = (model, build_tokenizer(config.tokenizer.tokenizer_type), config)
    return models


@pytest.fixture(scope="module")
def exported(models, tmp_path_factory):
    """(method, max_length) -> the harness's own model of the exported checkpoint."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = {}
    for method, (model, _, config) in models.items():
        folder = tmp_path_factory.mktemp("hf") / method
        to_hugging_face(model, config, folder, tokenizer=TokenizerFiles("CharLevelTokenizer"), report=quiet)
        loaded[method] = (
            AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval(),
            AutoTokenizer.from_pretrained(folder, trust_remote_code=True),
        )
    return lambda method, length: HFLM(
        pretrained=loaded[method][0], tokenizer=loaded[method][1], max_length=length, batch_size=4
    )


def harness_model(models, method, **options) -> HarnessModel:
    model, tokenizer, _ = models[method]
    return HarnessModel(model, tokenizer, **{"rolling_length": 16 * TRAIN_LENGTH, "report": quiet, **options})


def run_harness(model, folder, tasks=TASKS):
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=[folder], include_defaults=False)
    return simple_evaluate(model, tasks=list(tasks), task_manager=manager, log_samples=True)


@pytest.mark.ci
@pytest.mark.parametrize(("method", "length"), [("kerple_log", 24), ("learned", TRAIN_LENGTH)])
def test_every_response_equals_that_of_the_exported_model(method, length, models, exported, task_folder):
    """With truncated prompts and windows of pages."""
    results = run_harness(harness_model(models, method, max_length=length), task_folder)
    expected_results = run_harness(exported(method, length), task_folder)
    for task in TASKS:
        compared = 0
        for sample, expected_sample in zip(results["samples"][task], expected_results["samples"][task], strict=True):
            for response, expected in zip(sample["resps"], expected_sample["resps"], strict=True):
                if task == "continued":
                    assert response == expected
                elif task == "pages":
                    assert response == pytest.approx(expected, rel=1e-6)
                else:
                    assert response[0] == (pytest.approx(expected[0][0], abs=1e-4, rel=1e-6), expected[0][1])
                compared += 1
        assert compared == (24 if task == "choices" else 8)
    texts = [sample["resps"][0][0] for sample in results["samples"]["continued"]]
    assert len(set(texts)) > 4
    assert any(0 < len(text) < 12 for text in texts)  # ended by a stop sequence
    assert not any(stop in text for text in texts for stop in ("HH", "z"))


def test_evaluate_tasks(models, task_folder):
    model, tokenizer, _ = models["kerple_log"]
    lines = []
    results = evaluate_tasks(
        model,
        tokenizer,
        ["pages"],
        train_length=TRAIN_LENGTH,
        include_path=[task_folder],
        limit=2,
        max_length=16,
        report=lines.append,
    )
    assert results["results"]["pages"]["bits_per_byte,none"] > 1
    assert results["lengths"]["loglikelihood_rolling"] == {
        "requests": 2,
        "longest": 16,
        "max_length": 16,
        "cut": 1,
    }
    assert lines == [
        "loglikelihood_rolling: 2 requests of up to 160 tokens; max_length 16: 1 of them read in several windows"
    ]
    with pytest.raises(UserError, match="--include-path"):
        evaluate_tasks(model, tokenizer, ["pages"], train_length=TRAIN_LENGTH, include_path=["nowhere"])


def test_log_likelihoods_in_chunks_and_batches(models):
    harness = harness_model(models, "kerple_log")
    # Not ending with a space, which the harness would move to the continuation.
    contexts = [PYTHON[: length - 1] + "x" for length in (3, 700, 513, 512, 40, 1100)]
    requests = [Instance("loglikelihood", {}, (context, " end"), 0) for context in contexts]
    model, tokenizer, _ = models["kerple_log"]
    continuation = torch.tensor(tokenizer.tokenize(" end"))
    for context, (value, greedy) in zip(contexts, harness.loglikelihood(requests), strict=True):
        tokens = torch.tensor([*tokenizer.tokenize(context), *continuation[:-1]])
        with torch.no_grad():
            logits = model(tokens[None])[0, -4:].double()
        expected = logits.log_softmax(-1).gather(1, continuation[:, None]).sum().item()
        assert value == pytest.approx(expected, abs=1e-4)
        assert greedy == (logits.argmax(-1).equal(continuation))


@pytest.mark.parametrize("name", ["window@9", "sinks@2+9+reindexed+logn"])
def test_log_likelihoods_and_texts_in_modes(models, name):
    """Those of each text alone, without a cache, also in modes that depend on its length."""
    model, tokenizer, _ = models["kerple_log"]
    mode = parse_mode(name, TRAIN_LENGTH).attention
    harness = harness_model(models, "kerple_log", mode=mode)
    contexts = [PYTHON[: length - 1] + "x" for length in (40, 530, 39)]
    continuation = torch.tensor(tokenizer.tokenize(" end"))
    scores = harness.loglikelihood([Instance("loglikelihood", {}, (context, " end"), 0) for context in contexts])
    texts = harness.generate_until(
        [Instance("generate_until", {}, (text, {"max_gen_toks": 4, "until": []}), 0) for text in contexts]
    )
    for context, (value, _), text in zip(contexts, scores, texts, strict=True):
        prompt = tokenizer.tokenize(context)
        tokens = torch.tensor([*prompt, *continuation[:-1]])
        with torch.no_grad():
            logits = model(tokens[None], mode=mode.at_length(len(tokens)))[0, -4:].double()
        assert value == pytest.approx(logits.log_softmax(-1).gather(1, continuation[:, None]).sum().item(), abs=1e-4)
        (expected,) = generate(
            model, [prompt], maximum_tokens=4, recompute=True, mode=mode, eod=tokenizer.eod, vocab_size=256
        )
        assert text == tokenizer.detokenize(expected.tokens)


def test_a_mode_that_the_model_does_not_support(models):
    with pytest.raises(UserError, match="inference mode is not supported: pos_emb learned"):
        harness_model(models, "learned", mode=parse_mode("full+clip@8").attention)


def test_a_tokenizer_that_puts_a_token_before_texts(models):
    """That token, once, precedes a text whose perplexity is measured, an empty context and a context."""

    class WithBos(CharLevelTokenizer):
        bos = 7

        def tokenize(self, text):
            return [self.bos, *super().tokenize(text)]

    model = models["kerple_log"][0]
    harness = HarnessModel(model, WithBos(), rolling_length=64, report=quiet)
    text = PYTHON[:40]
    tokens = torch.tensor([7, *text.encode()])
    with torch.no_grad():
        values = model(tokens[None, :-1])[0].double().log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    (rolling,) = harness.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in (("", text), (text[:9], text[9:]))]
    (empty, _), (partial, _) = harness.loglikelihood(requests)
    assert rolling == pytest.approx(values.sum().item(), abs=1e-4)
    assert empty == pytest.approx(values.sum().item(), abs=1e-4)
    assert partial == pytest.approx(values[9:].sum().item(), abs=1e-4)


def test_a_context_of_white_space(models):
    """The harness moves the white space to the continuation, so the end-of-document token is the context."""
    harness = harness_model(models, "kerple_log")
    model, tokenizer, _ = models["kerple_log"]
    # The longer text comes first in the batch.
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in ((PYTHON[:30], "x"), ("  ", "x"), ("", "  x"))]
    _, (value, _), (empty, _) = harness.loglikelihood(requests)
    tokens = torch.tensor([tokenizer.eod, *b"  x"])
    with torch.no_grad():
        log_probabilities = model(tokens[None, :-1])[0].double().log_softmax(-1)
    expected = log_probabilities.gather(1, tokens[1:, None]).sum().item()
    assert value == pytest.approx(expected, abs=1e-4)
    assert empty == pytest.approx(expected, abs=1e-4)
    assert harness.lengths["loglikelihood"].longest == 30


def test_log_likelihoods_of_a_length_dependent_method_do_not_depend_on_the_batch():
    """With dynamic scaling, padding would change the angles of a shorter text."""
    options = {"scaling": "dynamic", "factor": 4.0, "trained_length": 16}
    model = small_gpt("rotary", padded_vocab_size=512, pos_emb_options=options)
    harness = HarnessModel(model, CharLevelTokenizer(), rolling_length=400, report=quiet)
    requests = [Instance("loglikelihood", {}, (PYTHON[: length - 1] + "x", " end"), 0) for length in (90, 24, 23)]
    together = harness.loglikelihood(requests)
    alone = [harness.loglikelihood([request])[0] for request in requests]
    assert [value for value, _ in together] == pytest.approx([value for value, _ in alone], abs=1e-4)


def test_a_stop_sequence_of_several_tokens_ends_the_text(models):
    harness = harness_model(models, "kerple_log")

    def generate(**options):
        (text,) = harness.generate_until([Instance("generate_until", {}, ("def", {"max_gen_toks": 40, **options}), 0)])
        return text

    text = generate(until=[])
    stop = text[5:8]
    assert generate(until=[stop]) == text[: text.index(stop)]
