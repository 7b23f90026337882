"""Models of the Hugging Face hub, `hf:ORG/NAME` or `hf:ORG/NAME@REVISION`, and Hugging Face folders in place of a
checkpoint folder; uploading.

huggingface_hub finds and downloads the files, so its cache (HF_HOME), offline mode (HF_HUB_OFFLINE) and login apply.
A model is converted once per commit, into HF_HOME/kerple. Only safetensors, JSON and tokenizer files are downloaded;
code and pickled files are not.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from megatron.checkpoint.directory import has_checkpoint, looks_like_checkpoint
from megatron.checkpoint.storage import CheckpointError
from megatron.convert.card import FOLDER_PLACEHOLDER
from megatron.convert.hugging_face import from_hugging_face
from megatron.convert.output import Report
from megatron.utils.errors import UserError, first_line, install_command

PREFIX = "hf:"

# Downloaded files. Weights in subfolders are other formats of the same model.
PATTERNS = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja"),
    *("model.safetensors", "model-*.safetensors", "model.safetensors.index.json"),
)
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def is_hub_name(checkpoint: str | Path) -> bool:
    """Whether this names a model on the hub."""
    return str(checkpoint).startswith(PREFIX)


def local_checkpoint(checkpoint: str | Path, report: Report = print) -> Path:
    """The folder of a checkpoint. A model on the hub is downloaded and converted unless an earlier call has done so. A
    Hugging Face folder is converted, too, and again after one of its files has changed.

    Raises:
        UserError: the model does not exist, needs a login, or cannot be downloaded.
        CheckpointError: it cannot be converted (see `from_hugging_face`).
    """
    if is_hub_name(checkpoint):
        snapshot = download(str(checkpoint))
        repository, version = snapshot.parent.parent.name, snapshot.name  # models--ORG--NAME/snapshots/COMMIT
    elif os.path.isfile(Path(checkpoint) / "config.json") and not looks_like_checkpoint(checkpoint):
        snapshot = Path(checkpoint).resolve()
        repository, version = f"folder--{snapshot.name}", _version(snapshot)
    else:
        return Path(checkpoint)
    from huggingface_hub import constants

    output = Path(constants.HF_HOME) / "kerple" / repository / version
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{output.parent}: cannot be created ({error.strerror}); set HF_HOME to a writable folder"
        ) from error
    with FileLock(f"{output}.lock"):  # several ranks, or several evaluations
        if not has_checkpoint(output):
            has_tokenizer = any((snapshot / name).exists() for name in TOKENIZERS)
            without = "" if has_tokenizer else ", without a tokenizer because there is none"
            report(f"converting {checkpoint} ({version[:8]}) to {output}{without}")
            from_hugging_face(snapshot, output, with_tokenizer=has_tokenizer, report=report)
    return output


def _version(folder: Path) -> str:
    """40 hexadecimal digits that change with the path of the folder and the sizes and times of its files."""
    files = sorted((path.name, path.stat()) for path in folder.iterdir() if path.is_file())
    content = [str(folder), *((name, status.st_size, status.st_mtime_ns) for name, status in files)]
    return hashlib.sha256(repr(content).encode("utf-8", "surrogateescape")).hexdigest()[:40]


def download(checkpoint: str) -> Path:
    """Download `hf:ORG/NAME[@REVISION]`, or find it in huggingface_hub's cache; return the folder. Raises UserError."""
    name, _, revision = checkpoint.removeprefix(PREFIX).partition("@")
    hub = import_hub()
    with_advice = "check the name, the network connection, and for a gated model the login (hf auth login)"
    folder = Path(
        _call(
            f"{checkpoint}: cannot be downloaded",
            with_advice,
            hub.snapshot_download,
            name,
            revision=revision or None,
            allow_patterns=list(PATTERNS),
        )
    )
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            f"{checkpoint}: has no model.safetensors; pickled weights are not downloaded (download pytorch_model.bin "
            "yourself, and convert it: tools/ckpts/convert.py from-hf)"
        )
    return folder


def check_upload(repository: str, *, private: bool = False) -> None:
    """Raises UserError if the name is invalid, there is no login, or the repository is public although `private`. To be
    called before a long conversion.
    """
    hub = import_hub()
    advice = "give the name as ORG/NAME, and log in with `hf auth login` or HF_TOKEN"
    _call(f"--push-to-hub {repository}", advice, hub.utils.validate_repo_id, repository)
    if repository.count("/") != 1:
        raise UserError(f"--push-to-hub {repository}: {advice}")
    api = hub.HfApi()
    _call(f"--push-to-hub {repository}: not logged in to the Hugging Face hub", advice, api.whoami)
    if private and _call(f"--push-to-hub {repository}", advice, api.repo_exists, repository):
        _check_private(api, repository, advice)


def upload(folder: str | Path, repository: str, *, private: bool = False, branch: str | None = None) -> str:
    """Upload an exported folder as one commit to a repository and a branch of it (default: the main one), which are
    created if needed; return the address of the repository.

    The login is huggingface_hub's own (HF_TOKEN or `hf auth login`). Raises UserError if the upload fails, or if the
    repository exists and is public although `private`.
    """
    api = import_hub().HfApi()
    problem, advice = f"upload to {repository}", f"{folder} is complete: upload it with `hf upload`"
    address = _call(problem, advice, api.create_repo, repository, private=private, exist_ok=True)
    if private:  # the hub ignores it for a repository that exists
        _check_private(api, repository, advice)
    if branch is not None and branch != "main":
        _call(problem, advice, api.create_branch, repository, branch=branch, exist_ok=True)
    card = Path(folder) / "README.md"
    if card.is_file():
        card.write_text(card.read_text("utf-8").replace(FOLDER_PLACEHOLDER, repository), "utf-8")
    options = {"folder_path": str(folder), "commit_message": "Upload model", "revision": branch}
    _call(problem, advice, api.upload_folder, repo_id=repository, **options)
    return str(address)


def _check_private(api: Any, repository: str, advice: str) -> None:
    problem = f"--push-to-hub {repository}"
    if not _call(problem, advice, api.repo_info, repository).private:
        raise UserError(
            f"{problem} --private: the repository exists and is public, so nothing was uploaded; make it private in "
            "its settings on the hub, or choose another name"
        )


def import_hub() -> Any:
    """The huggingface_hub library. Raises CheckpointError if it is not installed."""
    try:
        import huggingface_hub
        import huggingface_hub.utils
    except ImportError as error:
        raise CheckpointError(
            "models on the Hugging Face hub need the huggingface_hub library, which is not installed: "
            f"{install_command('eval')}"
        ) from error
    return huggingface_hub


def _call(problem: str, advice: str, function: Callable[..., Any], *words: Any, **options: Any) -> Any:
    try:
        return function(*words, **options)
    except Exception as error:  # the library raises errors of requests, httpx, the file system, and its own
        raise UserError(f"{problem}: {first_line(error)}; {advice}") from error
