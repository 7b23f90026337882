"""Ways to damage bytes, JSON, torch and safetensors files, tokenizers and tar files, deterministic for a `Random`."""

import json
import os
import pickle
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import Exploit

Random = random.Random

WRONG_VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 2**63, 10**30, 1e308, float("inf"), float("nan"), 0.5, "", "abc", "\0", "\x1b[31m"),
    *("../../escaped", "/dev/zero", "x" * 300, "\ud800", "global_step300", [], {}, [[]], [1, "a", None], {"a": {}}),
]
WRONG_NAMES = ["../escaped", "/etc/passwd", "/dev/zero", "a\0b", "", ".", "..", "x" * 300, "a\nb", "\ud800", "\x1b[2J"]


# -- bytes -------------------------------------------------------------------------------------------------------------


def damage_bytes(rng: Random, data: bytes) -> tuple[str, bytes]:
    """Flip, cut, repeat or insert bytes."""
    how = rng.choice(["flip", "flip", "cut", "one byte", "empty", "insert", "repeat", "zeros", "random"])
    at = rng.randrange(max(1, len(data)))
    if how == "flip":
        changed = bytearray(data)
        for _ in range(rng.choice([1, 1, 4, 64])):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return how, bytes(changed)
    short = rng.randbytes(rng.choice([1, 2, 8, 100]))
    return how, {
        "cut": data[:at],
        "one byte": bytes([rng.randrange(256)]),
        "empty": b"",
        "insert": data[:at] + short + data[at:],
        "repeat": data[:at] + data[max(0, at - 1000) :],
        "zeros": data[:at] + bytes(len(data) - at),
        "random": rng.randbytes(len(data)),
    }[how]


# -- torch files -------------------------------------------------------------------------------------------------------


def damage_torch_file(rng: Random, path: Path, marker: Path) -> str:
    """Damage a file of torch.save in place; return how."""
    how = rng.choice(["bytes", "pickle", "opcodes", "zip", "tensor", "tensor", "value", "legacy", "exploit"])
    data = path.read_bytes()
    if how == "bytes":
        detail, data = damage_bytes(rng, data)
        path.write_bytes(data)
        return f"{how} ({detail})"
    if how in ("pickle", "opcodes"):
        detail = _rewrite_zip(path, lambda pickled: damage_pickle(rng, pickled, how == "opcodes"))
    elif how == "zip":
        detail = damage_zip(rng, path)
    elif how == "exploit":
        detail = rng.choice(["zip", "pickle", "legacy"])
        value = {"w": torch.ones(3), "x": Exploit(marker)}
        if detail == "pickle":
            path.write_bytes(pickle.dumps(value["x"], protocol=rng.randrange(6)))
        else:
            torch.save(value, path, _use_new_zipfile_serialization=detail == "zip")
    else:
        state = torch.load(path, weights_only=False)  # written by this project
        if not isinstance(state, dict):
            state = {"w": state}
        key = rng.choice(list(state))
        if how == "legacy":
            torch.save(state, path, _use_new_zipfile_serialization=False)
            detail, data = damage_bytes(rng, path.read_bytes())
            path.write_bytes(data)
        elif how == "value":
            detail = f"{key} = {rng.choice(WRONG_VALUES)!r}"
            state = rng.choice(
                [state | {key: rng.choice(WRONG_VALUES)}, [state], key, None, {rng.choice([1, (1, 2)]): 1}]
            )
            torch.save(state, path)
        else:
            tensor = next((value for value in state.values() if isinstance(value, torch.Tensor)), torch.ones(4, 4))
            name, changed = rng.choice(hostile_tensors(tensor))
            detail = f"{key} is {name}"
            torch.save(state | {rng.choice([key, key, "new\x1b[31m", "x" * 300]): changed}, path)
    return f"{how} ({detail})"


def hostile_tensors(tensor: torch.Tensor) -> list[tuple[str, Any]]:
    """Tensors that a model cannot use instead of `tensor`, by name."""
    quantized = torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)
    return [
        ("integer", tensor.to(torch.int64)),
        ("boolean", tensor.bool()),
        ("complex", tensor.to(torch.complex64)),
        ("float8", tensor.to(torch.float8_e4m3fn)),
        ("meta", tensor.to("meta")),
        ("sparse", tensor.to_sparse()),
        ("quantized", quantized),
        ("expanded", torch.ones(1).expand(10**6, 10**6)),
        ("empty", torch.empty(0)),
        ("a scalar", torch.tensor(1.0)),
        ("of another shape", torch.ones(7)),
        ("of 60 dimensions", torch.ones((1,) * 60)),
        ("not finite", torch.full(tensor.shape, float("nan"))),
        ("infinite", torch.full(tensor.shape, float("inf"))),
        ("a parameter", torch.nn.Parameter(torch.ones(tensor.shape))),
    ]


def damage_pickle(rng: Random, pickled: bytes, opcodes: bool) -> tuple[str, bytes]:
    """Damage a pickle, or insert opcodes that torch's unpickler or Python's executes."""
    if not opcodes:
        return damage_bytes(rng, pickled)
    inserted = rng.choice(
        [
            b"cos\nsystem\n(S'touch escaped'\ntR",
            b"cbuiltins\nbytearray\n\x8a\x05\0\0\0\0\x04\x85R",  # bytearray(2**34)
            b"c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R",
            b"cnumpy.core.multiarray\n_reconstruct\n",
            b"ctorch._utils\n_rebuild_tensor_v2\n)R",
            b"ctorch._utils\n_rebuild_sparse_tensor\n)R",
            b"ccollections\nOrderedDict\n)R",
            b"ccollections\nCounter\nJ\xff\xff\xff\x7f\x85R",
            b"ctorch\nSize\n(J\xff\xff\xff\x7ftR",
            b"]" * rng.choice([10, 10**6]),
            b"(" * rng.choice([10, 10**6]),
            b"}" + b"(" * 1000,
            b"h\xff",
            b"r\xff\xff\xff\xff",
            b"j\xff\xff\xff\xff",
            b"X\xff\xff\xff\xffa",
            b"\x8a\xff" + b"\x7f" * 255,
            b"\x8b\xff\xff\xff\x7f",
            b"I" + b"9" * 5000 + b"\n",
            b"Q",
            b"0",
            b"b",
            b"u",
            b"\x80\x05",
            b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
            b"\x82\x01",
            b"].",
            b"K\x01.",
            b"N.",
            b"}]]]s.",
            *(bytes([rng.randrange(256)]) for _ in range(4)),
        ]
    )
    at = rng.choice([2, rng.randrange(2, len(pickled)), len(pickled) - 1])
    return f"{inserted[:12]!r} at {at}", pickled[:at] + inserted + pickled[at:]


def _rewrite_zip(
    path: Path, change: Callable[[bytes], tuple[str, bytes]], compression: int = zipfile.ZIP_STORED
) -> str:
    """Write the zip file again with `change` applied to data.pkl, so that all its sizes and checksums are right."""
    with zipfile.ZipFile(path) as source:
        records = {name: source.read(name) for name in source.namelist()}
    detail = ""
    with zipfile.ZipFile(path, "w", compression) as target:
        for name, content in records.items():
            if name.endswith("data.pkl"):
                detail, content = change(content)
            target.writestr(name, content)
    return detail


def damage_zip(rng: Random, path: Path) -> str:
    """Tricks with the structure of a zip file."""
    how = rng.choice(["deflate", "bomb", "twice", "case", "folder", "directory", "sizes", "storage size", "comment"])
    with zipfile.ZipFile(path) as source:
        records = {name: source.read(name) for name in source.namelist()}
    folder = next(iter(records)).partition("/")[0]
    if how in ("deflate", "bomb"):
        if how == "bomb":
            records[f"{folder}/data/0"] = bytes(64 << 20)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
            for name, content in records.items():
                target.writestr(name, content)
    elif how in ("twice", "case", "folder"):
        extra = {"twice": "data.pkl", "case": "DATA.PKL", "folder": "../data.pkl"}[how]
        records = {f"{folder}/{extra}.": b"\x80\x02}.", **records}
        with zipfile.ZipFile(path, "w") as target:
            for name, content in records.items():
                target.writestr(name.removesuffix("."), content)
    elif how == "storage size":  # the pickle claims more elements than the record has
        with zipfile.ZipFile(path, "w") as target:
            for name, content in records.items():
                target.writestr(name, content[:16] if "/data/" in name else content)
    else:
        data = bytearray(path.read_bytes())
        end = data.rfind(b"PK\5\6")
        start = struct.unpack("<I", data[end + 16 : end + 20])[0]
        field = {
            "directory": end + rng.choice([8, 10, 12, 16]),
            "sizes": start + rng.choice([10, 16, 20, 24, 28, 30, 42]),
            "comment": end + 20,
        }[how]
        data[field : field + 2] = rng.choice([b"\xff\xff", b"\x00\x00", b"\x08\x00", rng.randbytes(2)])
        path.write_bytes(bytes(data))
    return how


# -- JSON, safetensors, tokenizers, tar --------------------------------------------------------------------------------


def damage_json(rng: Random, data: bytes) -> tuple[str, bytes]:
    """Give one place of a JSON document another value or name, or write it in an unusual way."""
    how = rng.choice(["value", "value", "value", "name", "remove", "1e999", "deep", "twice", "digits", "large"])
    document = json.loads(data)
    text = data.decode()
    if how in ("value", "name", "remove"):
        place, key = document, rng.choice(list(document))
        while isinstance(place[key], dict) and place[key] and rng.random() < 0.7:
            place, key = place[key], rng.choice(list(place[key]))
        if how == "value":
            place[key] = rng.choice(WRONG_VALUES)
        else:
            value = place.pop(key)
            if how == "name":
                place[rng.choice(WRONG_NAMES)] = value
        return f"{how} {key}", json.dumps(document).encode()
    digits = [at for at, character in enumerate(text) if character.isdigit()]
    at = rng.choice(digits) if digits else 0
    return how, {
        "1e999": text[:at] + "1e999" + text[at + 1 :],
        "digits": text[:at] + "9" * 5000 + text[at + 1 :],
        "deep": '{"files": ' + rng.choice(["[", '{"a":']) * 200_000,
        "twice": "{" + text.strip()[1:-1] + ", " + text.strip()[1:],
        "large": text.rstrip()[:-1] + " " * (40 << 20) + "}",
    }[how].encode()


def write_or_replace(rng: Random, path: Path, data: bytes, case: Path) -> str:
    """Write the file, or put a folder, FIFO or link in its place."""
    how = rng.choice(["file"] * 12 + ["folder", "fifo", "device", "outside", "loop", "dangling"])
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "fifo":
        os.mkfifo(path)
    elif how == "file":
        path.write_bytes(data)
    else:
        target = {"device": "/dev/zero", "outside": "/etc/passwd", "loop": str(path), "dangling": str(case / "no")}[how]
        path.symlink_to(target)
    return how


def damage_safetensors(rng: Random, data: bytes) -> tuple[str, bytes]:
    """Damage a safetensors file: its header, or any of its bytes."""
    (size,) = struct.unpack("<Q", data[:8])
    header, body = data[8 : 8 + size], data[8 + size :]
    how = rng.choice(["bytes", "length", "json", "offsets", "dtype", "shape", "body"])
    if how == "bytes":
        detail, data = damage_bytes(rng, data)
        return f"{how} ({detail})", data
    if how == "length":
        length = rng.choice([2**63, 2**64 - 1, 2**40, 0, 1, len(data), size - 1, size + 1])
        return f"{how} {length}", struct.pack("<Q", length) + data[8:]
    if how == "body":
        return how, data[: rng.randrange(len(data))]
    if how == "json":
        detail, header = damage_json(rng, header)
        how = f"{how} ({detail})"
    else:
        entries = json.loads(header)
        key = rng.choice([name for name in entries if name != "__metadata__"])
        if how == "offsets":
            entries[key]["data_offsets"] = rng.choice([[0, 0], [0, 2**63], [5, 1], [-1, 4], [0, 64], [2**64, 2**65]])
        elif how == "dtype":
            entries[key]["dtype"] = rng.choice(["I32", "BOOL", "F8_E4M3", "F64", "C64", "X", "F4", "U8", 3, None])
        else:
            entries[key]["shape"] = rng.choice([[], [2**63], [2**32, 2**32], [-1], [0], [1] * 100, "x", [1.5]])
        how = f"{how} of {key}"
        header = json.dumps(entries).encode()
    return how, struct.pack("<Q", len(header)) + header + body


def damage_tokenizer(rng: Random, data: bytes) -> tuple[str, bytes]:
    """Damage a tokenizer.json: bytes, values, ids, regular expressions, and parts that make the library panic."""
    how = rng.choice(["bytes", "json", "id", "part", "part", "part"])
    if how in ("bytes", "json"):
        detail, data = (damage_bytes if how == "bytes" else damage_json)(rng, data)
        return f"{how} ({detail})", data
    document = json.loads(data)
    if how == "id":
        number = rng.choice([2**32 - 1, 2**32, 2**31, -1, 10**8, 10**30, 1.5, True])
        document["model"]["vocab"][rng.choice(list(document["model"]["vocab"]))] = number
        return f"id {number}", json.dumps(document).encode()
    key, value = rng.choice(HOSTILE_PARTS)
    document[key] = value
    return f"{key} {json.dumps(value)[:50]}", json.dumps(document).encode()


_REGEX = ["(?<a>.)(?<a>.)", "(", "(a+)+$", "\\K", "(?<=a+)b", "[", "\\p{Nope}", "(?R)", "a{100000}{100000}", "\x00"]
HOSTILE_PARTS: list[tuple[str, Any]] = [
    *(
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False})
        for regex in _REGEX
    ),
    *(("normalizer", {"type": "Replace", "pattern": {"Regex": regex}, "content": "x" * 100}) for regex in _REGEX),
    *(
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": text})
        for text in ("", "AAAA", "/////w==", "AQAAAA==", "BAAAAAAAAAA=", "not base64!", "AAQAAP////8AAAAA")
    ),
    ("decoder", {"type": "Replace", "pattern": {"String": ""}, "content": "x"}),
    ("decoder", {"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 2**63, "stop": 2**63}]}),
    ("post_processor", {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}),
    ("post_processor", {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
                        "pair": [], "special_tokens": {}}),
    ("truncation", {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 5}),
    ("padding", {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": 0, "pad_id": 0,
                 "pad_type_id": 0, "pad_token": "x"}),
    ("added_tokens", [{"id": 2**32 - 1, "content": "<|endoftext|>", "single_word": False, "lstrip": False,
                       "rstrip": False, "normalized": False, "special": True}]),
    ("added_tokens", [{"id": 0, "content": "", "single_word": False, "lstrip": False, "rstrip": False,
                       "normalized": True, "special": True}]),
    ("model", {"type": "Unigram", "unk_id": 7, "vocab": []}),
    ("model", {"type": "Unigram", "unk_id": 0, "vocab": [["<|endoftext|>", float("-1e308")], ["a", 0.0]]}),
    ("model", {"type": "WordPiece", "unk_token": "x", "continuing_subword_prefix": "##",
               "max_input_chars_per_word": 2**62, "vocab": {"<|endoftext|>": 0}}),
    ("model", {"type": "WordLevel", "unk_token": "x", "vocab": {"<|endoftext|>": 2**32 - 1}}),
    ("model", {"type": "BPE", "vocab": {"<|endoftext|>": 2**32 - 1, "a": 5}, "merges": [["a", "b"]]}),
]  # fmt: skip


def write_long_header(target: Any, kind: bytes, size: int) -> None:
    """A tar file whose first header is of type `kind` (x, g: PAX; L, K: GNU long name; S: sparse) with `size` bytes."""
    info = tarfile.TarInfo("run/latest")
    info.type, info.size = kind, size
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    if kind == b"S":  # another sparse header follows, and so on
        header[482] = 1
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
    target.write(bytes(header))
    block = (b"1" * 504 + b"\1" + bytes(7)) if kind == b"S" else b"a" * 512
    for _ in range(size // (512 * 2048)):
        target.write(block * 2048)
