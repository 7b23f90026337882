"""Models of the Hugging Face hub, `hf:ORG/NAME` or `hf:ORG/NAME@REVISION`, and Hugging Face folders
in place of a checkpoint folder.

huggingface_hub finds and downloads the files, so its cache (HF_HOME), offline mode (HF_HUB_OFFLINE)
and login apply. A model is converted once per commit and version of this project, into
HF_HOME/kerple. Only safetensors, JSON and tokenizer files are downloaded; code and pickled files
are not.
"""

import hashlib
import os
from pathlib import Path

import huggingface_hub
from filelock import FileLock
from huggingface_hub import constants

from kerple import __version__
from megatron.checkpoint.directory import has_checkpoint, looks_like_checkpoint
from megatron.convert.hugging_face import from_hugging_face
from megatron.utils.errors import UserError, first_line
from megatron.utils.ranks import Report

PREFIX = "hf:"

# Downloaded files. Weights in subfolders are other formats of the same model.
PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors-*.safetensors",
    "model.safetensors.index.json",
)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def local_checkpoint(
    checkpoint: str | Path, report: Report = print, pos_emb_module: str | None = None
) -> Path:
    """The folder of a checkpoint. A model on the hub is downloaded and converted unless an earlier
    call has done so. A Hugging Face folder is converted, too, and again after one of its files has
    changed. pos_emb_module: see `from_hugging_face`.

    Raises:
        UserError: the model does not exist, needs a login, or cannot be downloaded.
        CheckpointError: it cannot be converted (see `from_hugging_face`).
    """
    # Where the model is, and a name that changes with it.
    if str(checkpoint).startswith(PREFIX):
        snapshot = download(str(checkpoint))  # models--ORG--NAME/snapshots/COMMIT
        repository, version = snapshot.parent.parent.name, snapshot.name
    elif os.path.isfile(Path(checkpoint) / "config.json") and not looks_like_checkpoint(checkpoint):
        snapshot = Path(checkpoint).resolve()
        repository, version = f"folder--{snapshot.name}", _version(snapshot)
    else:
        return Path(checkpoint)

    # Several ranks, or several evaluations, may convert it at the same time.
    output = Path(constants.HF_HOME) / "kerple" / __version__ / repository / version
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{output.parent}: cannot be created ({error.strerror}); set HF_HOME to a writable "
            "folder"
        ) from error
    with FileLock(f"{output}.lock"):
        if not has_checkpoint(output):
            has_tokenizer = any((snapshot / name).exists() for name in TOKENIZERS)
            message = f"converting {checkpoint} ({version[:8]}) to {output}"
            if not has_tokenizer:
                message += ", without a tokenizer because there is none"
            report(message)
            from_hugging_face(
                snapshot,
                output,
                with_tokenizer=has_tokenizer,
                pos_emb_module=pos_emb_module,
                report=report,
            )
    return output


def _version(folder: Path) -> str:
    """40 hexadecimal digits of the path of a folder and the sizes and times of its files. A copy of
    a file may keep the time of its contents, but not that of its entry (ctime).
    """
    content: list[object] = [str(folder)]
    for path in sorted(folder.iterdir()):
        if path.is_file():
            status = path.stat()
            times = status.st_mtime_ns, status.st_ctime_ns
            content.append((path.name, status.st_size, *times))
    return hashlib.sha256(repr(content).encode("utf-8", "surrogateescape")).hexdigest()[:40]


def download(checkpoint: str) -> Path:
    """Download `hf:ORG/NAME[@REVISION]`, or find it in huggingface_hub's cache; return the folder.
    Raises UserError.
    """
    name, _, revision = checkpoint.removeprefix(PREFIX).partition("@")
    try:
        snapshot = huggingface_hub.snapshot_download(
            name, revision=revision or None, allow_patterns=list(PATTERNS)
        )
    except Exception as error:  # of requests, httpx, the file system, or the library's own
        raise UserError(
            f"{checkpoint}: cannot be downloaded: {first_line(error)}; check the name, the network "
            "connection, and for a gated model the login (hf auth login)"
        ) from error
    folder = Path(snapshot)
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            f"{checkpoint}: has no model.safetensors; pickled weights are not downloaded (download "
            "pytorch_model.bin yourself, and convert it: kerple convert from-hf)"
        )
    return folder
