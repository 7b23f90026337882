"""Hostile checkpoints, archives, Hugging Face folders and tokenizers, for tools/ckpts: `GROUPS`."""

import atexit
import json
import os
import pickle
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import torch
import transformers
from hypothesis import strategies as st
from safetensors.torch import load_file

from megatron.checkpoint.directory import write_manifest_of_folder
from megatron.tokenizer.hugging_face import train_bpe
from tests.soak.cases import Case, Draw, MakeCase, pick
from tests.soak.changes import VALUES, archive, change_json, damage, flip, spoil, value_in
from tests.soak.configs import configs
from tests.support.archives import zip_of
from tests.support.checkpoints import Exploit
from tests.support.hostile import HOSTILE_PARTS, OPCODES, hostile_tensors, write_long_header
from tests.support.release import checkpoints
from tests.support.texts import PYTHON

INSPECT, CONVERT, IMPORT = "tools/ckpts/inspect.py", "tools/ckpts/convert.py", "tools/ckpts/import_release.py"


@cache
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


def hostile_checkpoint(kind: str, draw: Draw, folder: Path) -> Case:
    """One file of a checkpoint is changed: of torch, the manifest, `latest` or the configuration."""
    run = folder / "in" / "run"
    shutil.copytree(base() / "run", run)
    step = run / "global_step300"
    if kind == "files of torch":
        path = pick(draw, sorted(step.glob("*.pt")))
        damage_torch_file(draw, path, folder / "executed")
    elif kind == "latest":
        path = run / "latest"
        texts = ["global_step" + "9" * 900, "global_step٣٠٠", "global_step300" * 10**6]
        text = pick(draw, texts + [value for value in VALUES if isinstance(value, str)])
        path.write_bytes(text.encode(errors="surrogatepass"))
    elif kind == "configuration":
        (path,) = (step / "configs").iterdir()
        path.write_bytes(draw(configs(json.loads(path.read_bytes()))).content)
        if flip(draw, 3):
            spoil(draw, path)
    else:
        spoil(draw, step / "manifest.json")
    if kind in ("files of torch", "configuration") and not flip(draw, 5):
        (step / "manifest.json").unlink()
    convert = ([CONVERT, "to-hf", "in/run", "out", "--no-tokenizer"], [CONVERT, "to-release", "in/run", "out"])
    return case(folder, pick(draw, ([INSPECT, "in/run"], *convert)))


def damage_torch_file(draw: Draw, path: Path, marker: Path) -> None:
    """Damage a file of torch.save: its bytes, its pickle, its zip records, its values, or code to execute."""
    how = pick(draw, ("bytes", "pickle", "opcodes", "zip", "tensor", "tensor", "value", "exploit"))
    if how == "bytes":
        spoil(draw, path)
        return
    if how in ("pickle", "opcodes", "zip"):
        _damage_records(draw, path, how)
        return
    value = state = torch.load(path, weights_only=False)  # written by this project
    key = pick(draw, state)
    if how == "exploit":
        value = {"w": torch.ones(3), "x": Exploit(marker)}
    elif how == "value":
        other = pick(draw, VALUES)
        value = pick(draw, (state | {key: other}, [state], key, None, {1: 1}, {(1, 2): 1}))
    elif how == "tensor":
        tensor = next((value for value in state.values() if isinstance(value, torch.Tensor)), torch.ones(4, 4))
        _, changed = pick(draw, hostile_tensors(tensor))
        value = state | {pick(draw, (key, key, "new\x1b[31m", "x" * 300)): changed}
    if how == "exploit" and flip(draw, 3):
        path.write_bytes(pickle.dumps(value["x"], protocol=draw(st.integers(0, 5))))
        return
    legacy = flip(draw, 4)
    torch.save(value, path, _use_new_zipfile_serialization=not legacy)
    if legacy and flip(draw):
        path.write_bytes(damage(draw, path.read_bytes()))


def _damage_records(draw: Draw, path: Path, how: str) -> None:
    """Change the pickle of a zip file of torch.save, insert opcodes into it, or add or replace a record."""
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
    path.write_bytes(zip_of(records, pick(draw, (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))))


def hostile_archive(draw: Draw, folder: Path) -> Case:
    """An archive of a checkpoint, with a hostile name, content, member or header."""
    kind, run = pick(draw, ("zip", "tar", "tar.gz", "tar.xz", "tar.bz2")), base() / "run"
    path = folder / "in" / f"release.{kind}"
    path.parent.mkdir()
    if flip(draw, 5):
        with open(path, "wb") as target:
            write_long_header(target, pick(draw, (b"x", b"g", b"L", b"K", b"S")), 96 << 20)
    else:
        paths = [path for path in sorted(run.rglob("*")) if path.is_file()]
        files = {str(path.relative_to(base())): path.read_bytes() for path in paths}
        path.write_bytes(archive(draw, kind, files))
    return case(folder, [IMPORT, str(path), "-o", "out", "--max-gigabytes", "0.1"])


def _damage_safetensors(draw: Draw, path: Path) -> None:
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header, body = content[8 : 8 + size], content[8 + size :]
    entries = json.loads(header)
    entry = entries[pick(draw, [name for name in entries if name != "__metadata__"])]
    numbers = st.lists(st.sampled_from((0, 1, 4, 5, 64, 2**32, 2**63, 2**65, -1, 1.5, "x")), max_size=2)
    types = st.sampled_from(("I32", "BOOL", "F8_E4M3", "F64", "C64", "X", "F4", "U8", 3, None))
    key = pick(draw, ("data_offsets", "shape", "dtype"))
    entry[key] = draw(types if key == "dtype" else numbers)
    header = pick(draw, (json.dumps(entries).encode(), json.dumps(entries).encode(), change_json(draw, header)))
    length = pick(draw, (*[len(header)] * 6, 2**63, 2**64 - 1, 2**40, 0, 1, len(content)))
    path.write_bytes(struct.pack("<Q", length) + header + body)


def hostile_hugging_face(kinds: Sequence[str], draw: Draw, folder: Path) -> Case:
    """A Hugging Face folder with hostile weights, index, config.json, or files of the tokenizer."""
    place, kind = folder / "in" / "hf", pick(draw, kinds)
    shutil.copytree(base() / "hf", place)
    weights, config, tokenizer = (place / name for name in ("model.safetensors", "config.json", "tokenizer.json"))
    document = json.loads(tokenizer.read_bytes())
    vocabulary = document["model"]["vocab"]
    if kind == _HEADER:
        _damage_safetensors(draw, weights)
    elif kind == "key":
        keys = ("auto_map", {"AutoConfig": "escaped.Config"}), ("quantization_config", {"quant_method": "gptq"})
        keys += tuple((key, pick(draw, VALUES)) for key in ("rope_scaling", "architectures"))
        config.write_text(json.dumps(json.loads(config.read_bytes()) | dict([pick(draw, keys)])))
    elif kind == "file of torch":
        torch.save(load_file(weights), place / "pytorch_model.bin")
        weights.unlink()
        damage_torch_file(draw, place / "pytorch_model.bin", folder / "executed")
    elif kind == "index":
        weights.rename(place / "part.safetensors")
        index = value_in(draw, {"weight_map": {"a": "part.safetensors"}})
        (place / "model.safetensors.index.json").write_text(json.dumps(index))
    elif kind == "part":
        tokenizer.write_text(json.dumps(document | dict([pick(draw, HOSTILE_PARTS)])))
    elif kind == "id":
        vocabulary[pick(draw, vocabulary)] = pick(draw, (2**32 - 1, 2**32, 2**31, -1, 10**8, 10**30, 1.5, True))
        tokenizer.write_text(json.dumps(document))
    elif kind == "old files":
        tokenizer.unlink()
        (place / "vocab.json").write_text(json.dumps(vocabulary))
        (place / "merges.txt").write_text("\n".join(" ".join(pair) for pair in document["model"]["merges"]))
        spoil(draw, place / pick(draw, ("vocab.json", "merges.txt")))
    else:
        spoil(draw, place / kind)
    return case(folder, [CONVERT, "from-hf", "in/hf", "out"])


_HEADER = "header of safetensors"
_WEIGHTS = (_HEADER, _HEADER, "model.safetensors", "config.json", "key", "file of torch", "index")
_TOKENIZERS = ("part", "part", "part", "id", "tokenizer.json", "old files")
_KINDS = ("files of torch", "manifest", "latest", "configuration")
GROUPS: dict[str, MakeCase] = {
    **{f"checkpoint: {kind}": partial(hostile_checkpoint, kind) for kind in _KINDS},
    "checkpoint: archive": hostile_archive,
    "checkpoint: safetensors, Hugging Face": partial(hostile_hugging_face, _WEIGHTS),
    "tokenizers": partial(hostile_hugging_face, _TOKENIZERS),
}
