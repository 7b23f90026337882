"""Hostile checkpoints, archives, Hugging Face folders and tokenizers, for tools/ckpts: `GROUPS`."""

import atexit
import contextlib
import functools
import io
import json
import os
import pickle
import shutil
import struct
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from hypothesis import strategies as st
from safetensors.torch import load_file

from megatron.checkpoint.directory import write_manifest_of_folder
from megatron.tokenizer.hugging_face import train_bpe
from tests.soak.cases import Case, Draw, MakeCase, pick
from tests.soak.changes import VALUES, change_json, damage, flip, spoil, value_in
from tests.support.checkpoints import Exploit
from tests.support.hostile import HOSTILE_PARTS, hostile_tensors, write_long_header
from tests.support.release import checkpoints
from tests.support.texts import PYTHON

INSPECT, CONVERT, IMPORT = "tools/ckpts/inspect.py", "tools/ckpts/convert.py", "tools/ckpts/import_release.py"


@functools.cache
def base() -> Path:
    """A temporary folder with a released checkpoint, `run`, and a Hugging Face folder with a tokenizer, `hf`."""
    folder = Path(tempfile.mkdtemp(prefix="soak_"))
    atexit.register(shutil.rmtree, folder)
    shutil.copytree(checkpoints("kerple_log"), folder / "run")
    shutil.rmtree(folder / "run" / "global_step0")
    write_manifest_of_folder(folder / "run" / "global_step300", 300)
    sizes = {"vocab_size": 384, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.GPTNeoXConfig(**sizes, intermediate_size=64, max_position_embeddings=16)
    transformers.GPTNeoXForCausalLM(config).save_pretrained(folder / "hf")
    train_bpe([PYTHON[:20_000]], 300).save(str(folder / "hf" / "tokenizer.json"))
    return folder


def case(folder: Path, command: list[str]) -> Case:
    """What every tool of tools/ckpts does with hostile input; `folder` has the input in `in`."""
    before = set(os.listdir(folder))

    def problem(status: int, output: str) -> str | None:
        written = {name for name in os.listdir(folder) if not name.startswith(".")} - before - {"out", "output.log"}
        if written or (status == 2 and (folder / "out").exists()):
            return f"left {sorted(written)} or an output of a failed command"
        if status == 2 and sum(line.startswith("error") for line in output.splitlines()) != 1:
            return "no error of one line"
        return "the error names weights_only" if "weights_only" in output else None

    return Case(command, statuses=(0, 1, 2) if command[0] == INSPECT else (0, 2), problem=problem)


def hostile_checkpoint(kind: str) -> MakeCase:
    """One file of a checkpoint is changed: of torch, the manifest, `latest` or the configuration."""

    def make(draw: Draw, folder: Path, resources: contextlib.ExitStack) -> Case:
        run = folder / "in" / "run"
        shutil.copytree(base() / "run", run)
        step = run / "global_step300"
        if kind == "files of torch":
            path = pick(draw, sorted(step.glob("*.pt")))
            damage_torch_file(draw, path, folder / "executed")
        elif kind == "latest":
            path = run / "latest"
            text = pick(draw, [value for value in VALUES if isinstance(value, str)])
            text = pick(draw, (text, "global_step" + "9" * 900, "global_step٣٠٠", "global_step300" * 10**6))
            path.write_bytes(text.encode(errors="surrogatepass"))
        elif kind == "configuration":
            (path,) = (step / "configs").iterdir()
            values = json.loads(path.read_bytes())
            names = [*values, "rotary_pct", "pos_emb_options", "rpe_num_buckets", "padded_vocab_size"]
            changed = values | {pick(draw, names): pick(draw, [*VALUES, "learned", "rpe", "rotary"])}
            aliases = ["x0: &x0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
            aliases += [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]" for n in range(1, 10)]
            path.write_text(
                pick(draw, (json.dumps(changed), json.dumps(changed), "\n".join(aliases), "a: " + "[" * 10**5))
            )
            if flip(draw, 3):
                spoil(draw, path)
        else:
            spoil(draw, step / "manifest.json")
        if kind in ("files of torch", "configuration") and not flip(draw, 5):
            (step / "manifest.json").unlink()
        convert = ([CONVERT, "to-hf", "in/run", "out", "--no-tokenizer"], [CONVERT, "to-release", "in/run", "out"])
        return case(folder, pick(draw, ([INSPECT, "in/run"], *convert)))

    return make


# Opcodes that Python's or torch's unpickler would execute, or for which it would allocate memory.
OPCODES = (
    b"cos\nsystem\n(S'touch executed'\ntR", b"cbuiltins\nbytearray\n\x8a\x05\0\0\0\0\x04\x85R",
    b"c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R", b"ctorch._utils\n_rebuild_tensor_v2\n)R",
    b"ctorch._utils\n_rebuild_sparse_tensor\n)R", b"ccollections\nCounter\nJ\xff\xff\xff\x7f\x85R",
    b"ctorch\nSize\n(J\xff\xff\xff\x7ftR", b"]" * 10**6, b"(" * 10**6, b"r\xff\xff\xff\xff", b"j\xff\xff\xff\xff",
    b"X\xff\xff\xff\xffa", b"\x8a\xff" + b"\x7f" * 255, b"\x8b\xff\xff\xff\x7f", b"I" + b"9" * 5000 + b"\n", b"Q", b"0",
    b"b", b"u", b"\x80\x05", b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f", b"].", b"K\x01.", b"N.", b"}]]]s.",
)  # fmt: skip


def damage_torch_file(draw: Draw, path: Path, marker: Path) -> None:
    """Damage a file of torch.save: its bytes, its pickle, its zip records, its values, or code to execute."""
    how = pick(draw, ("bytes", "pickle", "opcodes", "zip", "tensor", "tensor", "value", "legacy", "exploit"))
    state = torch.load(path, weights_only=False)  # written by this project
    key = pick(draw, state)
    if how == "bytes":
        spoil(draw, path)
    elif how in ("pickle", "opcodes", "zip"):
        with zipfile.ZipFile(path) as source:
            records = {name: source.read(name) for name in source.namelist()}
        pickled = next(name for name in records if name.endswith("data.pkl"))
        content = records[pickled]
        if how == "pickle":
            records[pickled] = damage(draw, content)
        elif how == "opcodes":
            at = pick(draw, (2, draw(st.integers(2, len(content) - 1)), len(content) - 1))
            records[pickled] = content[:at] + pick(draw, OPCODES) + content[at:]
        else:
            name = pick(draw, records)
            extra = pick(draw, (pickled.upper(), f"{pickled[:-8]}../data.pkl", name))
            records |= {extra: pick(draw, (b"\x80\x02}.", bytes(64 << 20), records[name][:16]))}
        with zipfile.ZipFile(path, "w", pick(draw, (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as target:
            for name, content in records.items():
                target.writestr(name, content)
    elif how == "exploit":
        value = {"w": torch.ones(3), "x": Exploit(marker)}
        if flip(draw, 3):
            path.write_bytes(pickle.dumps(value["x"], protocol=draw(st.integers(0, 5))))
        else:
            torch.save(value, path, _use_new_zipfile_serialization=flip(draw))
    elif how == "legacy":
        torch.save(state, path, _use_new_zipfile_serialization=False)
        path.write_bytes(damage(draw, path.read_bytes()))
    elif how == "value":
        value = pick(draw, VALUES)
        torch.save(pick(draw, (state | {key: value}, [state], key, None, {1: 1}, {(1, 2): 1})), path)
    else:
        tensor = next((value for value in state.values() if isinstance(value, torch.Tensor)), torch.ones(4, 4))
        _, changed = pick(draw, hostile_tensors(tensor))
        torch.save(state | {pick(draw, (key, key, "new\x1b[31m", "x" * 300)): changed}, path)


def add(archive: tarfile.TarFile, name: str, content: bytes, **attributes: object) -> None:
    """Add a member to a tar file, with the given attributes of TarInfo."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for attribute, value in attributes.items():
        setattr(info, attribute, value)
    archive.addfile(info, io.BytesIO(content))


def hostile_archive(draw: Draw, folder: Path, resources: contextlib.ExitStack) -> Case:
    """An archive of a checkpoint, with a hostile name, content, member or header."""
    kind = pick(draw, ("zip", "tar", "tar.gz", "tar.xz", "tar.bz2"))
    archive = folder / "in" / f"release.{kind}"
    archive.parent.mkdir()
    run = base() / "run"
    files = {f"run/{path.relative_to(run)}": path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    how, chosen = pick(draw, ("bytes", "name", "content", "link", "header")), pick(draw, files)
    if how == "name":
        names = ("../escaped", "/tmp/escaped", "run/ab", "x" * 300, "run", "a\x1b[31m")
        files[pick(draw, names)] = files.pop(chosen)
    elif how == "content":
        files[chosen] = damage(draw, files[chosen])
    if how == "header":
        with open(archive, "wb") as target:
            write_long_header(target, pick(draw, (b"x", b"g", b"L", b"K", b"S")), 96 << 20)
    elif kind == "zip":
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as target:
            for name, content in files.items():
                target.writestr(name, content)
    else:
        with tarfile.open(archive, f"w:{kind[4:]}") as target:
            for name, content in files.items():
                add(target, name, content)
            if how == "link":
                types = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, b"Z")
                add(target, "run/link", b"", type=pick(draw, types), linkname="../../escaped")
    if how == "bytes":
        archive.write_bytes(damage(draw, archive.read_bytes()))
    return case(folder, [IMPORT, str(archive), "-o", "out", "--max-gigabytes", "0.1"])


def _damage_safetensors(draw: Draw, path: Path) -> None:
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header, body = content[8 : 8 + size], content[8 + size :]
    entries = json.loads(header)
    entry = entries[pick(draw, [name for name in entries if name != "__metadata__"])]
    offsets = ([0, 0], [0, 2**63], [5, 1], [-1, 4], [0, 64], [2**64, 2**65])
    shapes = ([], [2**63], [2**32, 2**32], [-1], [0], [1] * 100, "x", [1.5])
    types = ("I32", "BOOL", "F8_E4M3", "F64", "C64", "X", "F4", "U8", 3, None)
    key, values = pick(draw, (("data_offsets", offsets), ("shape", shapes), ("dtype", types)))
    entry[key] = pick(draw, values)
    header = pick(draw, (json.dumps(entries).encode(), json.dumps(entries).encode(), change_json(draw, header)))
    length = pick(draw, (*[len(header)] * 6, 2**63, 2**64 - 1, 2**40, 0, 1, len(content)))
    path.write_bytes(struct.pack("<Q", length) + header + body)


def hostile_hugging_face(draw: Draw, folder: Path, resources: contextlib.ExitStack) -> Case:
    """A Hugging Face folder with hostile weights, index or config.json."""
    place = folder / "in" / "hf"
    shutil.copytree(base() / "hf", place)
    weights, config = place / "model.safetensors", place / "config.json"
    how = pick(draw, ("safetensors", "safetensors", "bytes", "config", "key", "bin", "index"))
    if how == "safetensors":
        _damage_safetensors(draw, weights)
    elif how in ("bytes", "config"):
        spoil(draw, weights if how == "bytes" else config)
    elif how == "key":
        values: dict[str, Any] = {"auto_map": {"AutoConfig": "escaped.Config"}, "rope_scaling": pick(draw, VALUES)}
        values |= {"quantization_config": {"quant_method": "gptq"}, "architectures": pick(draw, VALUES)}
        key = pick(draw, values)
        config.write_text(json.dumps(json.loads(config.read_bytes()) | {key: values[key]}))
    elif how == "bin":
        torch.save(load_file(weights), place / "pytorch_model.bin")
        weights.unlink()
        damage_torch_file(draw, place / "pytorch_model.bin", folder / "executed")
    else:
        weights.rename(place / "part.safetensors")
        index = value_in(draw, {"weight_map": {"a": pick(draw, [*VALUES, "part.safetensors"])}})
        (place / "model.safetensors.index.json").write_text(json.dumps(index))
    return case(folder, [CONVERT, "from-hf", "in/hf", "out", "--no-tokenizer"])


def hostile_tokenizer(draw: Draw, folder: Path, resources: contextlib.ExitStack) -> Case:
    """A tokenizer.json, or a vocab.json with a merges.txt, for the conversion from Hugging Face."""
    place = folder / "in" / "hf"
    shutil.copytree(base() / "hf", place)
    path = place / "tokenizer.json"
    document = json.loads(path.read_bytes())
    how = pick(draw, ("part", "part", "part", "id", "file", "old files"))
    if how == "part":
        key, value = pick(draw, HOSTILE_PARTS)
        path.write_text(json.dumps(document | {key: value}))
    elif how == "id":
        vocabulary = document["model"]["vocab"]
        vocabulary[pick(draw, vocabulary)] = pick(draw, (2**32 - 1, 2**32, 2**31, -1, 10**8, 10**30, 1.5, True))
        path.write_text(json.dumps(document))
    elif how == "file":
        spoil(draw, path)
    else:
        path.unlink()
        (place / "vocab.json").write_text(json.dumps(document["model"]["vocab"]))
        (place / "merges.txt").write_text("\n".join(" ".join(pair) for pair in document["model"]["merges"]))
        spoil(draw, place / pick(draw, ("vocab.json", "merges.txt")))
    return case(folder, [CONVERT, "from-hf", "in/hf", "out"])


_KINDS = ("files of torch", "manifest", "latest", "configuration")
_OTHERS: dict[str, Callable[..., Case]] = {
    "checkpoint: archive": hostile_archive,
    "checkpoint: safetensors, Hugging Face": hostile_hugging_face,
    "tokenizers": hostile_tokenizer,
}
GROUPS: dict[str, MakeCase] = {**{f"checkpoint: {kind}": hostile_checkpoint(kind) for kind in _KINDS}, **_OTHERS}
