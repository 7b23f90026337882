"""generate.py: text from a checkpoint, as in GPT-NeoX: unconditional, from a file of prompts, or
interactive.
"""

import argparse
import codecs
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kerple.attention import FULL_MODE, Mode
from megatron.checkpoint.configuration import check_trained_tokenizer
from megatron.cli.model_options import (
    checkpoint_folders,
    chosen_step,
    first_process,
    load,
    parse_with_checkpoint,
    tokenizer_files,
)
from megatron.config.schema.training import GenerationConfig
from megatron.convert.tokenizer_files import check_rows
from megatron.evaluation.modes import parse_modes
from megatron.inference.decoder import as_decoder
from megatron.inference.generation import Sampling, generate
from megatron.model.gpt import GPT
from megatron.tokenizer.interface import Tokenizer
from megatron.utils.command_line import integer, path_option
from megatron.utils.errors import UserError
from megatron.utils.files import check_writable, read_file, write_atomically
from megatron.utils.progress import Progress

DESCRIPTION = "Generate text from a checkpoint."
STANDARD_OUTPUT = "-"
MAX_PROMPT_BYTES = 1 << 26
EMPTY_PROMPT_END = "prompt_end is empty; set it to the text that ends a prompt, such as a newline"


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, load the checkpoint, and generate. Raises UserError."""
    # Only the first process generates.
    config, options = parse_with_checkpoint(DESCRIPTION, argv, _add_options)
    if not first_process():
        return
    settings = config.generation
    prompt_end = settings.prompt_end.replace("\r\n", "\n")  # as in the prompts

    # Reject invalid requests before loading the model.
    (inference_mode,) = parse_modes([options.mode], config.model.seq_length)
    mode, prompt_file = _generation_mode(settings, options.input)
    output = options.output or settings.sample_output_file
    contexts: list[str] = []
    if mode == "interactive":
        if not prompt_end:
            raise UserError(EMPTY_PROMPT_END)
        if output is not None or settings.num_samples > 1:
            note = (
                "note: text_gen_type is interactive; -o, sample_output_file and num_samples are "
                "ignored"
            )
            print(note, file=sys.stderr, flush=True)
    else:
        if output not in (None, STANDARD_OUTPUT):
            if not Path(output).parent.is_dir():
                raise UserError(
                    f"cannot write {output}: folder {Path(output).parent} does not exist"
                )
            check_writable(Path(output).parent, "--output")
            if Path(output).is_dir():
                raise UserError(f"cannot write {output}: it is a folder; choose a file with -o")
            if prompt_file is not None and Path(output).resolve() == Path(prompt_file).resolve():
                raise UserError(
                    f"cannot write {output}: it is the file of prompts; choose another file with -o"
                )
        prompts = [""]
        if prompt_file is not None:
            prompts = read_prompts(prompt_file, prompt_end)
        contexts = [prompt for prompt in prompts for _ in range(settings.num_samples)]
        sampling = Sampling(settings.temperature, settings.top_k, settings.top_p)
        if settings.num_samples > 1 and sampling.is_greedy:
            note = (
                "the samples of a prompt are identical: temperature is 0 (greedy decoding); set it "
                "above 0 to sample"
            )
            print(f"note: {note}", file=sys.stderr, flush=True)

    # Load the model only now, because it takes time.
    step = chosen_step(checkpoint_folders(config, options)[0], config, options)
    model, saved = load(step, config, options)
    tokenizer = tokenizer_files(config, saved).build()
    allowed = config.checkpoint.allow_other_tokenizer
    check_trained_tokenizer(
        model.provenance.get("tokenizer"), tokenizer, allowed=allowed, place="the checkpoint"
    )
    check_rows(tokenizer, model.settings.padded_vocab_size)
    reason = as_decoder(model).unsupported_reason(inference_mode.attention)
    if reason is not None:
        raise UserError(f"inference mode {inference_mode.name} {reason}")
    texts = partial(
        continue_texts,
        model,
        tokenizer,
        settings,
        batch_size=options.batch_size,
        mode=inference_mode,
    )
    if mode == "interactive":
        interact(texts, prompt_end, config.training.seed)
        return

    # Generate, and print or save the texts.
    records = texts(contexts, seed=config.training.seed, show_progress=True)
    if output is None:
        print(readable(records), flush=True)
        return
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    if output == STANDARD_OUTPUT:
        sys.stdout.buffer.write(lines.encode())
        sys.stdout.flush()
    else:
        write_atomically(Path(output), lines.encode())
        print(f"wrote {len(records)} texts to {output}", flush=True)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-i",
        "--input",
        "--sample-input-file",
        type=path_option,
        metavar="FILE",
        help="file of prompts; default: sample_input_file",
    )
    parser.add_argument(
        "-o",
        "--output",
        "--sample-output-file",
        type=path_option,
        metavar="FILE",
        help="JSON lines file, or - for JSON lines on stdout; default: sample_output_file, or "
        "readable text on stdout",
    )
    parser.add_argument(
        "--batch-size",
        type=integer(1, 2**20),
        default=32,
        help="number of texts generated at once (default: %(default)s)",
    )
    parser.add_argument(
        "--mode",
        default="full",
        help="inference mode, such as window@512 or sinks@4+508, whose KV cache is bounded "
        "(default: %(default)s; see docs/evaluation.md)",
    )


def _generation_mode(settings: GenerationConfig, input_file: str | None) -> tuple[str, str | None]:
    """(text_gen_type, file of prompts); -i overrides both. The file is None in other modes. Without
    text_gen_type: input-file if a file is set, otherwise unconditional.
    """
    mode, configured = settings.text_gen_type, settings.sample_input_file
    if input_file is not None:
        if mode not in (None, "input-file"):
            note = f"note: prompts are read from {input_file} (-i), text_gen_type {mode} is ignored"
            print(note, file=sys.stderr, flush=True)
        return "input-file", input_file

    # Without -i, the configuration decides.
    if mode is None:
        mode, reason = "input-file", "sample_input_file is set"
        if configured is None:
            mode, reason = "unconditional", "no file of prompts"
        note = f"note: text_gen_type is not set; using {mode} ({reason})"
        print(note, file=sys.stderr, flush=True)
    if mode != "input-file":
        return mode, None
    if configured is None:
        raise UserError(
            "text_gen_type is input-file, but no file is set: set sample_input_file, or give -i "
            "FILE"
        )
    return mode, configured


def readable(records: Sequence[dict[str, Any]]) -> str:
    """The prompts with their continuations, each under a line with its number and length."""
    parts = []
    for number, record in enumerate(records, start=1):
        title = f"sample {number} of {len(records)}, {record['length']} tokens"
        if record["message"] is not None:
            title += f": {record['message']}"
        parts.append(f"--- {title} ---")
        parts.append(record["context"] + record["text"])
    return "\n".join(parts)


def read_prompts(path: str | Path, prompt_end: str) -> list[str]:
    """The prompts in a UTF-8 file, see `split_prompts`. Raises UserError if there are none."""
    try:
        text = read_file(path, MAX_PROMPT_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte 0x{error.object[error.start]:02x} at {error.start}); "
            "save it as UTF-8"
        ) from error
    prompts = split_prompts(text.replace("\r\n", "\n"), prompt_end)
    if not prompts:
        raise UserError(
            f"{path} has no prompt: write one per line (or end each with prompt_end, "
            f"{prompt_end!r})"
        )
    return prompts


def split_prompts(text: str, prompt_end: str) -> list[str]:
    """Split a text after each `prompt_end`, and drop blank prompts. If `prompt_end` does not end
    with a newline, a newline that follows it is removed too.
    """
    if not prompt_end:
        raise UserError(EMPTY_PROMPT_END)
    parts = text.split(prompt_end)
    if not prompt_end.endswith("\n"):
        parts = [part.removeprefix("\n") for part in parts]
    return [part for part in parts if part.strip()]


def continue_texts(
    model: GPT,
    tokenizer: Tokenizer,
    settings: GenerationConfig,
    contexts: Sequence[str],
    *,
    seed: int,
    batch_size: int,
    mode: Mode = FULL_MODE,
    show_progress: bool = False,
) -> list[dict[str, Any]]:
    """Continue texts with the configured sampling: one record per context, in order, with the
    fields of GPT-NeoX's. A context without tokens starts with the end-of-document token. Raises
    UserError if the model does not support the mode.
    """
    prompts = [tokens or [tokenizer.eod] for tokens in tokenizer.tokenize_batch(contexts)]
    unknown = tokenizer.unknown_id
    count = sum(tokens.count(unknown) for tokens in prompts if unknown is not None)
    if count:
        print(
            f"notice: {count:,} tokens of the texts are the unknown token: the tokenizer has no "
            "token for that text, which the model does not see",
            file=sys.stderr,
        )

    # Progress is counted in texts, because their lengths are not known in advance.
    with Progress("generating", len(prompts), log_interval=None, enabled=show_progress) as progress:
        finished = itertools.count(1)
        generations = generate(
            model,
            prompts,
            maximum_tokens=settings.maximum_tokens,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            seed=seed,
            eod=tokenizer.eod,
            vocab_size=tokenizer.vocab_size,
            batch_size=batch_size,
            recompute=settings.recompute,
            mode=mode.attention,
            on_generation=lambda *_: progress.update(next(finished)),
        )

    # Text and length do not include the prompt.
    records = []
    for context, generation in zip(contexts, generations, strict=True):
        record: dict[str, Any] = {
            "context": context,
            "text": tokenizer.detokenize_continuation(generation.prompt, generation.tokens),
            "length": len(generation.tokens),
            "finished": generation.finished,
            "message": generation.message,
            "duration_seconds": round(generation.duration_seconds, 6),
        }
        records.append(record)
    return records


def interact(texts: Callable[..., list[dict[str, Any]]], prompt_end: str, seed: int) -> None:
    """Read prompts from standard input and continue each one, until the end of the input. Each has
    another seed, so that repeating a prompt gives another text. texts: `continue_texts` with its
    first arguments.
    """
    marker = ""
    if sys.stdin.isatty():
        marker = ">>> "
        print(f"Type a prompt, ended by {prompt_end!r}. Ctrl-D (end of input) quits.", flush=True)
    try:
        for turn, prompt in enumerate(_typed_prompts(prompt_end, marker)):
            (record,) = texts([prompt], seed=seed + turn)
            print(record["text"], flush=True)
            if record["message"] is not None:
                print(f"note: {record['message']}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(flush=True)


def _typed_prompts(prompt_end: str, marker: str) -> Iterator[str]:
    """Yield each prompt as soon as it is complete. The end of the input ends the last one."""
    buffer = ""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    while True:
        if not buffer:
            print(marker, end="", flush=True)
        line = sys.stdin.buffer.readline()
        try:
            buffer += decoder.decode(line, final=not line).replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise UserError(
                f"the prompt is not UTF-8 text (byte 0x{error.object[error.start]:02x})"
            ) from error
        if not line:
            yield from split_prompts(buffer, prompt_end)
            return

        # Blank lines after the last prompt do not begin the next one.
        complete, end, rest = buffer.rpartition(prompt_end)
        if end:
            yield from split_prompts(complete, prompt_end)
            buffer = rest if rest.strip() else ""
