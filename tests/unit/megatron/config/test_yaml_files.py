"""GPT-NeoX's style of YAML, and a one-line error for everything else."""

import pytest

from megatron.config import Config, UserError, load_config
from megatron.config.yaml_files import find_file, parse, parse_override, read_file

MODEL = '"num-layers": 2, "hidden-size": 32, "num-attention-heads": 4, "seq-length": 16, "pos-emb": "none"'


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
    assert entries["optimizer"].value == {"type": "Adam", "params": {"lr": 6e-4, "betas": [0.9, 0.999]}}
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
        ("0.1", 0.1),
        ("true", True),
        ("null", None),
        ("", None),
        ("[1, 2e0]", [1, 2.0]),
        ("e5", "e5"),
        ("1e", "1e"),
        ("runs/1e-4", "runs/1e-4"),
        ("2026-01-02", "2026-01-02"),
        ("{a: 1e-3}", {"a": 1e-3}),
    ],
)
def test_values(text, value):
    key, parsed = parse_override(f"a={text}")
    assert (key, parsed) == ("a", value)
    assert type(parsed) is type(value)


def test_block_style_and_byte_order_mark(write):
    path = write("a.yml", b"\xef\xbb\xbfnum-layers: 2\nsplit: 949,50,1\n")
    assert [(entry.key, entry.value) for entry in read_file(path)] == [("num-layers", 2), ("split", "949,50,1")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{'a': 1,\n\n 'b': \xff}", r":3: not UTF-8 text \(byte 0xff\)"),
        ('{"a": 1\n "b": 2}', r":2: not YAML: .*expected ',' or '}'"),
        ("a: 1\n\tb: 2", r":2: not YAML"),
        ("[1, 2]", "contains a sequence; expected one mapping"),
        ("just text", "contains a scalar"),
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("a: 1\n---\nb: 2\n", r":2: not YAML: .*another document"),
        ("{1: 2}", ":1: key 1 is not a string"),
        ("a: 1\nyes: 2", ":2: key True is not a string"),
        ("a: 1\nb: 2\na: 3\n", "key 'a' appears twice, in lines 1 and 3"),
        ("{a: {b: 1,\n b: 2}}", "key 'b' appears twice, in lines 1 and 2"),
        ("{a: !!python/object/apply:os.system [ls]}", ":1: not YAML: .*could not determine a constructor"),
        ("{a: *nowhere}", "not YAML: .*undefined alias"),
    ],
)
def test_bad_files(write, text, message):
    path = write("a.yml", text)
    with pytest.raises(UserError, match=message) as caught:
        read_file(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_deep_nesting_is_an_error():
    with pytest.raises(UserError, match="nested too deeply"):
        parse("[" * 100_000, "a.yml")


def test_find_file(write, tmp_path):
    write("sub/a.yml", f"{{{MODEL}}}")
    write("sub/b.yaml", '{"seed": 7}')
    assert find_file("a", tmp_path / "sub").name == "a.yml"
    assert find_file("a.yml", tmp_path / "sub").name == "a.yml"
    assert find_file(tmp_path / "sub" / "a.yml", "elsewhere").name == "a.yml"
    assert load_config(["a", "b"], tmp_path / "sub").training.seed == 7


def test_missing_file(write, tmp_path):
    write("small_bf16.yml", "{}")
    with pytest.raises(UserError, match=r"smal_bf16: no such file; nearest: small_bf16\.yml"):
        load_config(["smal_bf16"], tmp_path)
    with pytest.raises(UserError, match="no such file, and no folder"):
        load_config(["a.yml"], tmp_path / "nowhere")
    with pytest.raises(UserError, match="contains 1 YAML files"):
        load_config(["qqqqqq"], tmp_path)


def test_unreadable_file(write, monkeypatch):
    path = write("a.yml", "{}")

    def raise_error(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_bytes", raise_error)
    with pytest.raises(UserError, match=r"a\.yml: cannot be read: Permission denied"):
        read_file(path)


def test_aliases_do_not_multiply_memory():
    """A "billion laughs" file: nine levels of ten references to the previous level."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 10)]
    entries = parse("\n".join(lines), "a.yml")
    assert entries[9].value[0] is entries[8].value
    with pytest.raises(UserError, match=r'a\.yml:1: "a0" is not a known key'):
        Config.from_flat({entry.key: entry.value for entry in entries}, source="a.yml:1")
