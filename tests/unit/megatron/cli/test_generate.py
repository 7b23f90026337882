"""generate.py: unconditional, from files of prompts and interactive; its output, and invalid
requests.
"""

import io
import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest

from megatron.cli.generate import continue_texts, main, read_prompts, split_prompts
from megatron.config.schema.training import GenerationConfig
from megatron.inference.generation import Generation, generate
from megatron.tokenizer.tokenizer import build_tokenizer
from tests.support.checkpoints import write_checkpoint
from tests.support.errors import assert_rejected
from tests.support.language_models import small_gpt
from tests.support.sentencepiece import LLAMA, train_sentencepiece

TOKENIZER = build_tokenizer("CharLevelTokenizer")
CHOICE = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "maximum_tokens": 48}


@pytest.fixture
def trained(checkpoints):
    """Folder of a checkpoint, and the model in it."""
    return checkpoints["kerple_log"]


@pytest.fixture
def configuration(configuration):
    return partial(configuration, **CHOICE)


def expected(model, contexts, *, seed=77, **changes):
    """Texts by the library, from the same settings except for the changes."""
    prompts = [TOKENIZER.tokenize(context) or [TOKENIZER.eod] for context in contexts]
    generations = generate(
        model, prompts, seed=seed, eod=0, vocab_size=512, **{**CHOICE, **changes}
    )
    return [TOKENIZER.detokenize(generation.tokens) for generation in generations]


def read_records(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


PROMPTS = ["def main(", "class Ünï:", "x"]


@pytest.mark.parametrize(
    ("keys", "words", "contexts"),
    [
        ({}, ["-i", "prompts.txt", "-o", "out"], PROMPTS),
        (
            {"text_gen_type": "unconditional", "num_samples": 3, "sample_output_file": "out"},
            [],
            [""] * 3,
        ),
        (
            {"text_gen_type": "input-file", "sample_input_file": "prompts.txt", "num_samples": 2},
            ["-o", "out"],
            [prompt for prompt in PROMPTS for _ in range(2)],
        ),
    ],
    ids=["file of prompts", "unconditional", "several samples"],
)
def test_records(tmp_path, monkeypatch, configuration, trained, capsys, keys, words, contexts):
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("\n".join(PROMPTS) + "\n\n", encoding="utf-8")
    main([configuration(**keys), *words])
    records = read_records("out")
    assert [record["context"] for record in records] == contexts
    assert [record["text"] for record in records] == expected(trained[1], contexts)
    assert len({record["text"] for record in records}) == len(records)
    for record in records:
        assert list(record) == [
            "context",
            "text",
            "length",
            "finished",
            "message",
            "duration_seconds",
        ]
        assert record["finished"] or record["length"] == 48  # beyond the training length of 32
        assert record["message"] is None
        assert record["duration_seconds"] > 0
    assert f"wrote {len(contexts)} texts to" in capsys.readouterr().out


def test_the_space_between_a_prompt_and_the_text_of_sentencepiece(tmp_path, monkeypatch, capsys):
    tokenizer = build_tokenizer(
        "SPMTokenizer", train_sentencepiece(tmp_path / "tokenizer.model", **LLAMA)
    )

    def paris(model, prompts, **options):
        return [
            Generation(prompt, tokenizer.tokenize("Paris."), True, None, 0.1) for prompt in prompts
        ]

    monkeypatch.setattr("megatron.cli.generate.generate", paris)
    contexts = ["The capital is", ""]
    records = continue_texts(
        small_gpt("none"), tokenizer, GenerationConfig(), contexts, seed=1, batch_size=2
    )
    assert [record["text"] for record in records] == [" Paris.", "Paris."]
    assert not capsys.readouterr().err
    monkeypatch.setattr(type(tokenizer), "unknown_id", tokenizer.tokenize("capital")[0])
    continue_texts(small_gpt("none"), tokenizer, GenerationConfig(), contexts, seed=1, batch_size=2)
    assert "1 tokens of the texts are the unknown token" in capsys.readouterr().err


def test_modes(tmp_path, configuration):
    output, texts = tmp_path / "a", {}
    for mode in ("full", "sinks@2+6"):
        main([configuration(text_gen_type="unconditional"), "-o", str(output), "--mode", mode])
        texts[mode] = read_records(output)[0]["text"]
    assert texts["full"] != texts["sinks@2+6"]


def test_texts_are_printed_by_default(tmp_path, monkeypatch, configuration, trained, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text("ab\ncd")
    words = [configuration(), "-i", "p.txt", "--set"]
    main([*words, "maximum_tokens=4"])
    first, second = expected(trained[1], ["ab", "cd"], maximum_tokens=4)
    output = re.sub(r"[1-4] tokens", "N tokens", capsys.readouterr().out)  # fewer, if a text ends
    assert output == (
        f"--- sample 1 of 2, N tokens ---\nab{first}\n--- sample 2 of 2, N tokens ---\ncd{second}\n"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.yml", "p.txt"]


def test_set_overrides_the_checkpoints_configuration(tmp_path, trained):
    folder, model = trained
    output = tmp_path / "out.jsonl"
    words = ["--checkpoint", str(folder), "-o", str(output), "--set", "text_gen_type=unconditional"]
    main([*words, "temperature=0.5", "maximum-tokens=20", "seed=3"])
    alone = generate(model, [[0]], maximum_tokens=20, temperature=0.5, seed=3, eod=0)[0]
    assert read_records(output)[0]["text"] == TOKENIZER.detokenize(alone.tokens)
    assert_rejected("temprature", main, [*words, "temprature=0.5"])


@pytest.mark.parametrize(
    ("keys", "typed", "contexts"),
    [
        (
            {},
            b"\xef\xbb\xbfdef f\n\nab",
            ["def f", "ab"],
        ),  # Windows PowerShell starts a pipe with a byte order mark
        ({"prompt_end": "\r\n"}, b"ab\r\ncd", ["ab", "cd"]),
        (
            {"prompt_end": "###"},
            b"def f():\n    return ###\nx = 1 ### y",
            ["def f():\n    return ", "x = 1 ", " y"],
        ),
    ],
    ids=["lines", "lines of Windows", "over lines"],
)
def test_interactive_prompts(configuration, trained, monkeypatch, capsys, keys, typed, contexts):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed)))
    main([configuration(text_gen_type="interactive", num_samples=2, **keys)])
    texts = [
        expected(trained[1], [context], seed=77 + turn)[0] for turn, context in enumerate(contexts)
    ]
    captured = capsys.readouterr()
    assert captured.out == "".join(f"{text}\n" for text in texts)
    assert "num_samples are ignored" in captured.err


def test_learned_positions_stop_with_a_message(tmp_path, data):
    folder = tmp_path / "learned"
    write_checkpoint(folder, "learned", data)
    (tmp_path / "p.txt").write_text("x" * 30 + "\n" + "y" * 40)
    output = tmp_path / "out.jsonl"
    main(["--checkpoint", str(folder), "-i", str(tmp_path / "p.txt"), "-o", str(output)])
    short, long = read_records(output)
    assert (short["length"], short["finished"]) == (
        3,
        False,
    )  # positions 30, 31 and the token after
    assert (long["text"], long["length"], long["finished"]) == ("", 0, False)
    assert "32" in short["message"]
    assert "32" in long["message"]


@pytest.mark.parametrize(
    ("text", "prompt_end", "prompts"),
    [
        ("a\nb c\n\n  \n d\n", "\n", ["a", "b c", " d"]),
        ("a\nb###\nc", "###", ["a\nb", "c"]),
        ("a###\n###\n", "###", ["a"]),
        ("a<\n>\nb", "<\n>\n", ["a", "b"]),
    ],
)
def test_splitting_prompts(text, prompt_end, prompts):
    assert split_prompts(text, prompt_end) == prompts


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"good\nb\xe9d\n", r"p\.txt.*0xe9.*6"),
        (b"\xef\xbb\xbf\n", r"p\.txt"),
    ],
)
def test_bad_prompt_files(tmp_path, content, message):
    (tmp_path / "p.txt").write_bytes(content)
    assert_rejected(message, read_prompts, tmp_path / "p.txt", "\n")
    assert_rejected("absent", read_prompts, tmp_path / "absent", "\n")


@pytest.mark.parametrize(
    ("keys", "words", "message"),
    [
        ({"text_gen_type": "input-file"}, [], "sample_input_file"),
        ({"text_gen_type": "unconditional"}, ["--device", "abacus"], "--device abacus"),
        ({"text_gen_type": "unconditional"}, ["-o", "nowhere/out.jsonl"], "nowhere"),
        ({"text_gen_type": "unconditional"}, ["-o", "/proc/out.jsonl"], "--output.*/proc"),
        ({"text_gen_type": "unconditional", "hidden_size": 64}, [], "hidden_size 32.*64"),
        ({"text_gen_type": "unconditional"}, ["--mode", "sinks@4"], "'sinks@4'"),
        ({"text_gen_type": "unconditional"}, ["--mode", "full+dynamic-ntk"], r"full.dynamic-ntk"),
        ({"text_gen_type": "unconditional"}, ["-o", "/"], "cannot write /: it is a folder"),
        ({"text_gen_type": "interactive", "prompt_end": ""}, [], "prompt_end"),
        ({}, ["-i", "all.yml", "-o", "./all.yml"], r"all\.yml: it is the file of prompts"),
    ],
)
def test_invalid_requests(tmp_path, monkeypatch, configuration, keys, words, message):
    monkeypatch.chdir(tmp_path)
    assert_rejected(message, main, [configuration(**keys), *words])
    assert [path.name for path in tmp_path.iterdir()] == ["all.yml"]


def test_a_tokenizer_larger_than_the_model(tmp_path, data):
    folder = tmp_path / "small"
    write_checkpoint(folder, "none", data, vocabulary=384)
    (tmp_path / "p.txt").write_text("a")
    assert_rejected(
        r"512.*384", main, ["--checkpoint", str(folder), "-i", str(tmp_path / "p.txt"), "-o", "-"]
    )


@pytest.mark.parametrize(
    ("keys", "words", "context", "note"),
    [
        ({}, [], "", "text_gen_type is not set; using unconditional"),
        ({"sample_input_file": "p.txt"}, [], "ab", "text_gen_type is not set; using input-file"),
        (
            {"text_gen_type": "unconditional"},
            ["-i", "p.txt"],
            "ab",
            "text_gen_type unconditional is ignored",
        ),
    ],
)
def test_the_type_by_default_and_with_a_file(
    tmp_path, monkeypatch, configuration, capsys, keys, words, context, note
):
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("ab")
    main([configuration(**keys), *words, "-o", "-"])
    output, errors = capsys.readouterr()
    assert json.loads(output)["context"] == context
    assert errors.count(note) == 1
