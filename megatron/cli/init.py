"""Write the configuration of a small experiment on your own text, with sizes that fit the text and
the machine.

kerple prepare NAME --from FOLDER
kerple init NAME [-d data]

NAME.yml trains one model; NAME-sweep.yml compares KERPLE's log kernel and ALiBi, with two seeds
each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.data.indexed_dataset import IndexedFiles, open_indexed_files, read_manifest
from megatron.data.splits import split_spans
from megatron.preparation.own_text import SPLIT
from megatron.tokenizer.tokenizer import build_tokenizer
from megatron.utils.command_line import docstring_parser
from megatron.utils.environment import has_bf16_instructions, machine
from megatron.utils.errors import UserError
from megatron.utils.files import write_atomically
from megatron.utils.templates import templates


@dataclass(frozen=True)
class Size:
    """A model and its training. min_tokens: of the text. steps: at most, see `MAX_EPOCHS`."""

    layers: int
    hidden: int
    heads: int
    length: int
    batch: int
    lr: float
    steps: int
    min_tokens: int


# The first one trains on a laptop in minutes; the last one is KERPLE's recipe.
SIZES = (
    Size(4, 128, 4, 128, 16, 2e-3, 600, 0),
    Size(8, 512, 8, 256, 32, 1e-3, 5_000, 20_000_000),
    Size(12, 768, 12, 512, 32, 6e-4, 50_000, 400_000_000),
)
MAX_EPOCHS, MIN_STEPS = 4, 50
MULTIPLES = (1, 2, 4, 8, 16)  # tested lengths, in training lengths
MAX_SCORED_TOKENS = 245_760


def main(argv: Sequence[str] | None = None) -> None:
    """Write the two files. Raises UserError if one exists, if there is no dataset of this name with
    its own tokenizer, or too little text.
    """
    parser = docstring_parser(__doc__)
    parser.add_argument(
        "name", metavar="NAME", help="dataset that `kerple prepare NAME` has prepared"
    )
    parser.add_argument(
        "-d",
        "--data-dir",
        type=Path,
        default=Path("data"),
        metavar="DIR",
        help="its folder (default: %(default)s)",
    )
    options = parser.parse_args(argv)

    # The dataset must have been tokenized with the tokenizer in its folder.
    prefix = options.data_dir / options.name / f"{options.name}_text_document"
    if not Path(f"{prefix}.idx").is_file():
        raise UserError(
            f"there is no dataset {prefix}; prepare it first: kerple prepare {options.name} --from "
            f"FOLDER -d {options.data_dir}"
        )
    vocabulary = prefix.parent / "tokenizer.json"
    manifest = read_manifest(prefix)
    is_own = vocabulary.is_file()
    if is_own:
        fingerprint = build_tokenizer("HFTokenizer", vocabulary).fingerprint
        is_own = manifest is None or manifest.tokenizer_fingerprint == fingerprint
    if not is_own:
        raise UserError(
            f"{prefix} was not tokenized with a tokenizer that kerple prepare has trained "
            f"({vocabulary}); prepare it with --force, without --tokenizer"
        )

    # Nothing is overwritten.
    paths = Path(f"{options.name}.yml"), Path(f"{options.name}-sweep.yml")
    for path in paths:
        if path.exists():
            raise UserError(f"{path} exists; remove it to write it again")
    template = templates("megatron.cli").get_template("init_sweep.yml.j2")
    texts = configuration(options.name, prefix), template.render(name=options.name)
    for path, text in zip(paths, texts, strict=True):
        write_atomically(path, text.encode())
    print(f"{paths[0]}: one model, for example: kerple train {paths[0]} pos_emb/kerple_log.yml")
    print(f"{paths[1]}: four models and their comparison: kerple sweep {paths[1]}")


def configuration(name: str, prefix: Path) -> str:
    """The training configuration, as commented YAML. Raises UserError for too little text."""
    # The largest model that the text and the machine allow.
    train, valid, _ = _split_tokens(open_indexed_files(prefix))
    size = SIZES[0]
    bf16 = has_bf16_instructions()
    if torch.cuda.is_available():
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        for larger in SIZES[1:]:
            if larger.min_tokens <= train:
                size = larger

    # Its training, and the lengths that the validation text has at least four times.
    step_tokens = size.length * size.batch
    steps = min(size.steps, MAX_EPOCHS * train // step_tokens)
    lengths = [size.length * multiple for multiple in MULTIPLES]
    lengths = [length for length in lengths if length <= valid // 4]
    if steps < MIN_STEPS or not lengths:
        needed = MIN_STEPS * step_tokens // MAX_EPOCHS
        raise UserError(
            f"{prefix} has {train:,} tokens for training and {valid:,} for validation, but at "
            f"least {needed:,} and {4 * size.length:,} are needed; prepare more text"
        )
    scored = min(valid, MAX_SCORED_TOKENS) // lengths[-1] * lengths[-1]
    precision = "bfloat16" if bf16 else "fp32"
    template = templates("megatron.cli").get_template("init.yml.j2")
    return template.render(
        name=name,
        prefix=prefix,
        split=SPLIT,
        machine=machine(),
        size=size,
        lengths=lengths,
        train=train,
        steps=steps,
        step_tokens=step_tokens,
        scored=scored,
        precision=precision,
    )


def _split_tokens(files: IndexedFiles) -> list[int]:
    """The number of tokens for training, validation and test."""
    offsets = files.offsets()
    spans = [span or (0, 0) for span in split_spans(SPLIT, len(offsets) - 1)]
    return [int(offsets[last] - offsets[first]) for first, last in spans]
