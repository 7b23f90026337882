"""Hostile checkpoints, archives, Hugging Face folders and tokenizers, each with the command that reads it.

`cases` is deterministic for a seed. Every case must end in success or in one line that begins with "error"; `problems`
returns what is wrong otherwise. Commands are relative to this project's folder, so that a case can run in a process.
"""

import bz2
import gzip
import io
import json
import lzma
import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoint.directory import write_manifest_of_folder
from megatron.tokenizer.hugging_face import train_bpe
from tests.support.hostile_files import (
    WRONG_NAMES,
    WRONG_VALUES,
    Random,
    damage_bytes,
    damage_json,
    damage_safetensors,
    damage_tokenizer,
    damage_torch_file,
    write_long_header,
    write_or_replace,
)
from tests.support.release import checkpoints
from tests.support.texts import PYTHON

INSPECT, CONVERT, IMPORT = "tools/ckpts/inspect.py", "tools/ckpts/convert.py", "tools/ckpts/import_release.py"


@dataclass(frozen=True)
class HostileCase:
    """One hostile input.

    Attributes:
        name: what was done to which file.
        kind: "load", "inspect", "import", "convert" or "tokenizer".
        command: script, relative to the project's folder, and its arguments.
        folder: contains `in` and, after success, `out`; nothing else may appear in it.
        verified: the damaged bytes are covered by a manifest, so the command must not succeed on changed weights.
    """

    name: str
    kind: str
    command: list[str]
    folder: Path
    verified: bool = False


def cases(folder: Path, seed: int, count: int) -> Iterator[HostileCase]:
    """`count` cases below `folder`, written one at a time. The caller may remove the folder of a case it has run."""
    base = folder / "base"
    if not base.exists():
        write_base(base)
    makers = list(MAKERS.items())
    for number in range(count):
        kind, make = makers[number % len(makers)]
        rng = Random(f"{seed} {number}")
        case = folder / f"case{number}"
        (case / "in").mkdir(parents=True)
        name, command, verified = make(rng, base, case)
        yield HostileCase(f"{number} {name}", kind, command, case, verified)


def problems(case: HostileCase, status: int, errors: str) -> list[str]:
    """What is wrong with a run of the case: its exit status, what it wrote to standard error, what it left behind."""
    found = []
    if status not in (0, 1, 2) or (status == 1 and case.command[0] != INSPECT):
        found.append(f"exit status {status}")
    for text in ("Traceback", "weights_only", "see the traceback"):
        if text in errors:
            found.append(f"the output contains {text!r}")
    if status == 2 and sum(line.startswith("error") for line in errors.splitlines()) != 1:
        found.append("no error of one line")
    if any(ord(character) < 32 and character not in "\n\t\r" for character in errors):
        found.append("control characters in the output")
    if extra := set(os.listdir(case.folder)) - {"in", "out"}:
        found.append(f"wrote {sorted(extra)}")
    if status == 2 and (case.folder / "out").exists():
        found.append("left output behind")
    return found


def write_base(base: Path) -> None:
    """A released checkpoint with a manifest, a Hugging Face folder of the same sizes, and a tokenizer."""
    shutil.copytree(checkpoints("kerple_log"), base / "run")
    shutil.rmtree(base / "run" / "global_step0")
    write_manifest_of_folder(base / "run" / "global_step300", 300)
    tokenizer = train_bpe([PYTHON[:20_000]], 300)
    hugging_face = base / "hf"
    hugging_face.mkdir()
    tokenizer.save(str(hugging_face / "tokenizer.json"))
    sizes = {"vocab_size": 384, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"model_type": "gpt_neox", **sizes, "intermediate_size": 64, "max_position_embeddings": 16}
    (hugging_face / "config.json").write_text(json.dumps(config))
    shapes = {
        "embed_in.weight": (384, 16),
        **{f"layers.0.{norm}.{kind}": (16,) for norm in ("input_layernorm", "post_attention_layernorm")
           for kind in ("weight", "bias")},
        **{"layers.0.attention.query_key_value.weight": (48, 16), "layers.0.attention.query_key_value.bias": (48,)},
        **{"layers.0.attention.dense.weight": (16, 16), "layers.0.attention.dense.bias": (16,)},
        **{"layers.0.mlp.dense_h_to_4h.weight": (64, 16), "layers.0.mlp.dense_h_to_4h.bias": (64,)},
        **{"layers.0.mlp.dense_4h_to_h.weight": (16, 64), "layers.0.mlp.dense_4h_to_h.bias": (16,)},
        **{"final_layer_norm.weight": (16,), "final_layer_norm.bias": (16,)},
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tensors = {f"gpt_neox.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors["embed_out.weight"] = torch.randn((384, 16), generator=generator)
    save_file(tensors, hugging_face / "model.safetensors")


# -- the checkpoint's folder -------------------------------------------------------------------------------------------


def _commands_for_folder(rng: Random, run: Path, case: Path) -> list[str]:
    return rng.choice(
        [
            [INSPECT, str(run)],
            [CONVERT, "to-hf", str(run), str(case / "out"), "--no-tokenizer"],
            [CONVERT, "to-release", str(run), str(case / "out")],
        ]
    )


def _copy_run(base: Path, case: Path) -> tuple[Path, Path]:
    run = case / "in" / "run"
    shutil.copytree(base / "run", run)
    return run, run / "global_step300"


def _torch_file_case(rng: Random, base: Path, case: Path) -> tuple[str, list[str], bool]:
    run, step = _copy_run(base, case)
    path = rng.choice(sorted(step.glob("*.pt")))
    how = damage_torch_file(rng, path, case / "executed")
    verified = rng.random() < 0.2
    if not verified:
        (step / "manifest.json").unlink()
        if rng.random() < 0.5:
            write_manifest_of_folder(step, 300)
    return f"{path.name}: {how}", _commands_for_folder(rng, run, case), verified


def _manifest_case(rng: Random, base: Path, case: Path) -> tuple[str, list[str], bool]:
    run, step = _copy_run(base, case)
    path = step / "manifest.json"
    if rng.random() < 0.25:
        how, data = damage_bytes(rng, path.read_bytes())
    else:
        how, data = damage_json(rng, path.read_bytes())
    write_or_replace(rng, path, data, case)
    return f"manifest: {how}", _commands_for_folder(rng, run, case), True


def _latest_case(rng: Random, base: Path, case: Path) -> tuple[str, list[str], bool]:
    run, _ = _copy_run(base, case)
    text = rng.choice([*(value for value in WRONG_VALUES if isinstance(value, str)), *WRONG_NAMES])
    text = rng.choice(
        [text, "global_step" + "9" * rng.choice([1, 30, 5000]), "global_step٣٠٠", "global_step300" * 10**6]
    )
    data = rng.choice([text.encode(errors="surrogatepass"), rng.randbytes(100), b""])
    if rng.random() < 0.3:
        shutil.rmtree(run / "global_step300")
    how = write_or_replace(rng, run / "latest", data, case)
    return f"latest: {data[:20]!r} {how}", _commands_for_folder(rng, run, case), False


def _config_case(rng: Random, base: Path, case: Path) -> tuple[str, list[str], bool]:
    run, step = _copy_run(base, case)
    (path,) = (step / "configs").iterdir()
    values = json.loads(path.read_bytes())
    how = rng.choice(["value", "value", "value", "bytes", "json", "alias", "deep"])
    if how == "value":
        key = rng.choice(
            [*values, "rotary_pct", "pos_emb_options", "rpe_num_buckets", "padded_vocab_size", "pos_emb_module"]
        )
        values[key] = rng.choice([*WRONG_VALUES, "learned", "rpe", "rotary", str(case / "executed.py")])
        data, how = json.dumps(values).encode(), f"{key} = {values[key]!r}"[:60]
    elif how == "bytes":
        how, data = damage_bytes(rng, path.read_bytes())
    elif how == "json":
        how, data = damage_json(rng, path.read_bytes())
    elif how == "alias":
        lines = ["x0: &x0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
        lines += [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]" for n in range(1, 10)]
        data = ("pos_emb_options: *x9\n" if rng.random() < 0.5 else "").join(["\n".join(lines) + "\n", ""]).encode()
    else:
        data = b"a: " + rng.choice([b"[", b"{a: "]) * 100_000
    (step / "manifest.json").unlink()
    write_or_replace(rng, path, data, case)
    return f"configs: {how}", _commands_for_folder(rng, run, case), False


# -- archives ----------------------------------------------------------------------------------------------------------


def _archive_case(rng: Random, base: Path, case: Path) -> tuple[str, list[str], bool]:
    kind = rng.choice(["zip", "tar", "tar.gz", "tar.xz", "tar.bz2"])
    archive = case / "in" / f"release.{kind}"
    files = {path.relative_to(base): path.read_bytes() for path in sorted((base / "run").rglob("*")) if path.is_file()}
    how = rng.choice(["bytes", "names", "content", "special", "long header", "sparse"])
    names = {path: path.as_posix() for path in files}
    extra: list[tarfile.TarInfo] = []
    if how == "names":
        names[rng.choice(list(files))] = rng.choice(
            ["../escaped", "/tmp/escaped", "run/a\0b", "x" * 300, "run", "a\x1b[31m"]
        )
    elif how == "content":
        chosen = rng.choice(list(files))
        files[chosen] = damage_bytes(rng, files[chosen])[1]
    elif how == "special":
        info = tarfile.TarInfo("run/link")
        info.type = rng.choice([tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, b"Z"])
        info.linkname = "../../escaped"
        extra = [info]
    if kind == "zip":
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as target:
            for path, content in files.items():
                target.writestr(names[path], content)
    elif how in ("long header", "sparse"):
        opened = {
            "tar": open,
            "tar.gz": gzip.open,
            "tar.xz": lzma.open,
            "tar.bz2": bz2.open,
        }
        with opened[kind](archive, "wb") as target:
            write_long_header(target, rng.choice([b"x", b"g", b"L", b"K"]) if how == "long header" else b"S", 96 << 20)
    else:
        with tarfile.open(archive, f"w:{kind[4:]}") as target:
            for path, content in files.items():
                info = tarfile.TarInfo(names[path])
                info.size = len(content)
                target.addfile(info, io.BytesIO(content))
            for info in extra:
                target.addfile(info)
    if how == "bytes":
        detail, data = damage_bytes(rng, archive.read_bytes())
        archive.write_bytes(data)
        how = f"{how} ({detail})"
    return f"{archive.name}: {how}", [IMPORT, str(archive), "-o", str(case / "out"), "--max-gigabytes", "0.1"], False


# -- Hugging Face folders and tokenizers -------------------------------------------------------------------------------


def _hugging_face_case(rng: Random, base: Path, case: Path) -> tuple[str, list[str], bool]:
    folder = case / "in" / "hf"
    shutil.copytree(base / "hf", folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    command = [CONVERT, "from-hf", str(folder), str(case / "out"), "--no-tokenizer"]
    target = rng.choice(["safetensors", "safetensors", "config", "bin", "index"])
    if target == "safetensors":
        how, data = damage_safetensors(rng, weights.read_bytes())
        write_or_replace(rng, weights, data, case)
    elif target == "config":
        how, data = damage_json(rng, config.read_bytes())
        if rng.random() < 0.4:
            extra = {
                "rope_scaling": rng.choice(WRONG_VALUES),
                "quantization_config": {"quant_method": rng.choice(["bitsandbytes", "gptq", "x"])},
                "auto_map": {"AutoConfig": "escaped.Config"},
                "attn_implementation": "kernels-community/x",
                "architectures": rng.choice(WRONG_VALUES),
            }
            key = rng.choice(list(extra))
            how, data = key, json.dumps(json.loads(config.read_bytes()) | {key: extra[key]}).encode()
        write_or_replace(rng, config, data, case)
    elif target == "bin":
        tensors = load_file(weights)
        weights.unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
        how = damage_torch_file(rng, folder / "pytorch_model.bin", case / "executed")
    else:
        weights.rename(folder / "part.safetensors")
        part = rng.choice([*WRONG_NAMES, *WRONG_VALUES, "part.safetensors"])
        index = rng.choice([{"weight_map": {"a": part}}, {"weight_map": part}, {}, [part]])
        how = str(part)[:20]
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return f"{target}: {how}", command, False


def _tokenizer_case(rng: Random, base: Path, case: Path) -> tuple[str, list[str], bool]:
    folder = case / "in" / "hf"
    shutil.copytree(base / "hf", folder)
    path = folder / "tokenizer.json"
    how, data = damage_tokenizer(rng, path.read_bytes())
    if rng.random() < 0.3:
        path.unlink()
        names = ("vocab.json", "merges.txt")
        content = json.loads((base / "hf" / "tokenizer.json").read_bytes())["model"]
        merges = "\n".join(" ".join(pair) for pair in content["merges"])
        files = dict(zip(names, (json.dumps(content["vocab"]).encode(), merges.encode()), strict=True))
        name = rng.choice(names)
        damage = damage_json if name == "vocab.json" and rng.random() < 0.5 else damage_bytes
        how, files[name] = damage(rng, files[name])
        for name, content in files.items():
            (folder / name).write_bytes(content)
    else:
        write_or_replace(rng, path, data, case)
    return f"tokenizer: {how}", [CONVERT, "from-hf", str(folder), str(case / "out")], False


MAKERS: dict[str, Callable[[Random, Path, Path], tuple[str, list[str], bool]]] = {
    "file": _torch_file_case,
    "manifest": _manifest_case,
    "file again": _torch_file_case,
    "latest": _latest_case,
    "config": _config_case,
    "archive": _archive_case,
    "convert": _hugging_face_case,
    "tokenizer": _tokenizer_case,
}
