"""GPT-NeoX's style of YAML, and a one-line error for everything else."""

import json
import os
from pathlib import Path

import pytest
import yaml

from megatron.config import UserError, load_config
from megatron.config.yaml_files import PACKAGED, find_file, parse, parse_override, read_file
from tests.support.configs import MINIMAL
from tests.support.errors import assert_rejected

MODEL = json.dumps(MINIMAL)


def test_flow_mapping_with_comments_and_trailing_commas(write):
    path = write(
        "a.yml",
        """# a comment
        {
           "num-layers": 12, # another
           "no-weight-tying": True,
           "pos_emb": "none",
           "optimizer": {"type": "Adam", "params": {"lr": 6.0e-4, "betas": [0.9, 0.999,], },},
        }
        """,
    )
    entries = {entry.key: entry for entry in read_file(path)}
    assert entries["num-layers"].value == 12
    assert entries["no-weight-tying"].value is True
    assert entries["optimizer"].value == {
        "type": "Adam",
        "params": {"lr": 6e-4, "betas": [0.9, 0.999]},
    }
    assert entries["optimizer"].place == f"{path}:6"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("6.0e-4", 6e-4),
        ("-1E5", -1e5),
        ("+2.5e+3", 2500.0),
        (".5e1", 5.0),
        ("1_000e3", 1e6),
        ("3", 3),
        ("0123", 123),
        ("-0100", -100),
        ("0x1F", 31),
        ("-0b101", -5),
        ("0.1", 0.1),
        ("true", True),
        ("null", None),
        ("", None),
        ("[1, 2e0]", [1, 2.0]),
        ("e5", "e5"),
        ("1e", "1e"),
        ("runs/1e-4", "runs/1e-4"),
        ("2026-01-02", "2026-01-02"),
        ("1:30", "1:30"),
        ("-.inf", float("-inf")),
        ("{a: 1e-3}", {"a": 1e-3}),
    ],
)
def test_values(text, value):
    key, parsed = parse_override(f"a={text}")
    assert (key, parsed) == ("a", value)
    assert type(parsed) is type(value)


def doubled(template: str, levels: int) -> str:
    """A text in which each level contains the one before by an alias."""
    lines = ["l0: &l0 1"]
    for level in range(1, levels):
        lines.append(f"l{level}: &l{level} {template.format(f'*l{level - 1}')}")
    return "\n".join(lines)


def test_block_style_and_byte_order_mark(write):
    path = write("a.yml", b"\xef\xbb\xbfnum-layers: 2\nsplit: 949,50,1\n")
    assert [(entry.key, entry.value) for entry in read_file(path)] == [
        ("num-layers", 2),
        ("split", "949,50,1"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{'a': 1,\n\n 'b': \xff}", "3.*0xff"),
        ('{"a": 1\n "b": 2}', r":2: not YAML: .*expected ',' or '}'"),
        ("a: 1\n\tb: 2", r":2: not YAML"),
        ("[1, 2]", "contains a sequence; expected one mapping"),
        ("just text", "contains a scalar"),
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("a: 1\n---\nb: 2\n", r":2: not YAML: .*another document"),
        ("{1: 2}", ":1: key 1 is not a string"),
        ("a: 1\nyes: 2", ":2: key yes is not a string"),
        ("a: 1\nb: 2\na: 3\n", "'a'.*1.*3"),
        ("{a: {b: 1,\n b: 2}}", "'b'.*1.*2"),
        ("{a: !!python/object/apply:os.system [ls]}", r"1.*python/object/apply:os\.system"),
        ("{a: !own 1}", "1.*!own"),
        ("{a: !!int abc}", "not YAML: .*'abc'"),
        ("{a: " + "1" * 5000 + "}", "not YAML: .*5000"),
        ("[" * 5000, "not YAML: "),
        ("{[a]: 1}", r":1: key \(a list or mapping\) is not a string"),
        ("{<<: 1, a: 1}", ":1: << needs a mapping"),
        ("{a: &a {b: 1}, c: {<<: *a,\n <<: *a}}", "'<<'.*1.*2"),
        ("a: \0", "not YAML: .*special characters are not allowed"),
        ("x" * 1_000_001, "1,000,000"),
        ("{a: *nowhere}", "not YAML: .*undefined alias"),
        ("!!set {a, b}", ":1: !!set"),
        ("a: 1\nb: !!binary aGk=", ":2: !!binary"),
        ("a: [1, !!omap [b: 1]]", ":1: !!omap"),
        ("a: !!timestamp 2020-01-01", ":1: !!timestamp"),
        ("a: 1\nb: &b [1, *b]", ":2: .*alias"),
        ("a: &a\n  b: &b {c: *a}", ":1: .*alias"),
        ("&a {b: {c: [*a]}}", ":1: .*alias"),
        (doubled("[{0}, {0}]", 60), "alias"),
        (doubled("{{x: {0}, y: [{0}]}}", 40), "alias"),
        (f"a: &a {'x' * 9000}\nb: [{'*a, ' * 300}]", "alias"),
        (doubled("[{0}]", 120), "100 levels"),
        (
            f"a: &a {{{', '.join(f'k{n}: 1' for n in range(3000))}}}\nb: {{<<: [{'*a, ' * 3000}]}}",
            ":2: .*<<",
        ),
    ],
)
def test_bad_files(write, text, message):
    path = write("a.yml", text)
    with pytest.raises(UserError, match=message) as caught:
        read_file(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_merge_keys(monkeypatch):
    """A mapping's own keys win, then the earlier mapping of the list. That does not depend on
    PyYAML: in 6.0.4, the first value of a key in `merged` wins in one case and the last one in
        another.
    """
    monkeypatch.setattr(yaml.SafeLoader, "flatten_mapping", lambda loader, node: None)
    text = """
    first: &first {lr: 1, beta: 2}
    second: &second {<<: *first, lr: 3}
    third: &third {lr: 4, eps: 5}
    merged:
    - {<<: [*second, *first], z: 6}
    - {<<: [*first, *second]}
    - {<<: [*third, *second]}
    - {lr: 0, <<: [*second, *third]}
    <<: *third
    eps: 7
    """
    entries = {entry.key: (entry.value, entry.line) for entry in parse(text, "a.yml")}
    assert entries["second"] == ({"lr": 3, "beta": 2}, 3)
    assert entries["merged"][0] == [
        {"lr": 3, "beta": 2, "z": 6},
        {"lr": 1, "beta": 2},
        {"lr": 4, "eps": 5, "beta": 2},
        {"lr": 0, "beta": 2, "eps": 5},
    ]
    assert (entries["lr"], entries["eps"]) == ((4, 4), (7, 11))


def test_find_file(write, tmp_path):
    write("sub/a.yml", MODEL)
    write("sub/b.yaml", '{"seed": 7}')
    assert find_file("a", tmp_path / "sub").name == "a.yml"
    assert find_file("a.yml", tmp_path / "sub").name == "a.yml"
    assert find_file(tmp_path / "sub" / "a.yml", "elsewhere").name == "a.yml"
    assert load_config(["a", "b"], tmp_path / "sub").training.seed == 7


def test_files_of_this_project_are_found_by_name(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_file("demo") == PACKAGED / "demo.yml"
    config = load_config(["demo", "pos_emb/alibi.yml"])
    assert config.model.pos_emb == "alibi"
    assert config.notices[0] == f"demo.yml, pos_emb/alibi.yml: this project's own, from {PACKAGED}"
    assert_rejected(r"pos_emb/alibbi.*alibi\.yml", find_file, "pos_emb/alibbi")
    assert_rejected("demo: no such file", find_file, "demo", tmp_path)
    write("demo.yml", MODEL)  # one in the working directory comes first
    assert find_file("demo") == Path("demo.yml")


def test_names_are_expanded(write, tmp_path, monkeypatch):
    write("models/small.yml", MODEL)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MODELS", "models")
    for arguments in (
        ("~/models/small",),
        ("small.yml", "~/$MODELS"),
        (Path("~/models/small.yml"),),
    ):
        assert find_file(*arguments) == tmp_path / "models" / "small.yml"


def test_files_that_cannot_be_read(write, tmp_path):
    write("small_bf16.yml", "{}")
    for name, message in (
        ("smal_bf16", r"smal_bf16.*small_bf16\.yml"),
        ("qqqqqq", f"searched {tmp_path}, which have 1 YAML files"),
        ("a" * 300, "File name too long"),
        (".", "not a regular file"),
    ):
        assert_rejected(message, find_file, name, tmp_path)
    assert_rejected("no such file, and no folder", find_file, "a.yml", tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.yml")
    assert_rejected(r"pipe\.yml", find_file, "pipe.yml", tmp_path)
    assert_rejected(r"pipe\.yml", read_file, tmp_path / "pipe.yml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed", "--set seed"),
        ("=3", "--set"),
        ("a={b: 1, b: 2}", "--set.*'b'"),
        ("a=!!int abc", "--set.*'abc'"),
        ("a=&b [*b]", "--set.*alias"),
        ("a=!!set {b, c}", "--set.*!!set"),
        ("a=[", r"--set a=\[: not YAML: .*; put quotes around strings"),
    ],
)
def test_bad_overrides(text, message):
    with pytest.raises(UserError, match=message) as caught:
        parse_override(text)
    assert len(str(caught.value)) < 600
