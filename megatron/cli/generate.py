"""generate.py: text from a checkpoint, as GPT-NeoX's: unconditional, from a file of prompts, or interactive."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import Progress

from megatron.cli.model_options import (
    checkpoint_folders,
    first_process,
    load,
    load_tokenizer,
    parse_with_checkpoint,
)
from megatron.config import UserError
from megatron.config.schema import GenerationConfig
from megatron.inference.generation import Generation, generate
from megatron.tokenizer import Tokenizer
from megatron.utils.files import write_atomically

DESCRIPTION = "Generate text from a checkpoint."
STANDARD_OUTPUT = "-"
EMPTY_END = "prompt_end is empty: it must be what ends a prompt, such as a line's end"


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, load the checkpoint once, and generate. Raises UserError."""
    config, options = parse_with_checkpoint(DESCRIPTION, argv, _options)
    if not first_process():
        return
    # What is wrong with the request is said before a model is loaded.
    request = _request(config.generation, options)
    model, saved = load(checkpoint_folders(config, options)[0], config, options)
    tokenizer = load_tokenizer(config, saved, model.settings.padded_vocab_size)
    writer = Writer(model, tokenizer, config.generation, config.training.seed, options.batch_size)
    if request.contexts is None:
        interact(writer, config.generation.prompt_end)
    else:
        _save(writer.write(request.contexts, show_progress=True), request.output)


@dataclass(frozen=True)
class Request:
    """What to continue, None meaning what will be typed, and the file the results go to."""

    contexts: list[str] | None
    output: str


def _request(settings: GenerationConfig, options: argparse.Namespace) -> Request:
    kind = _kind(settings, options.input)
    output = options.output or settings.sample_output_file or STANDARD_OUTPUT
    if kind == "interactive":
        if not settings.prompt_end:
            raise UserError(EMPTY_END)
        return Request(None, STANDARD_OUTPUT)
    if output != STANDARD_OUTPUT and not Path(output).parent.is_dir():
        raise UserError(f"cannot write {output}: there is no folder {Path(output).parent}")
    if kind == "unconditional":
        return Request([""] * settings.num_samples, output)
    prompts = read_prompts(options.input or settings.sample_input_file, settings.prompt_end)
    return Request([prompt for prompt in prompts for _ in range(settings.num_samples)], output)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-i", "--input", metavar="FILE", help="file of prompts; default: sample_input_file")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="JSON lines; - for the screen; default: sample_output_file"
    )
    parser.add_argument("--batch-size", type=int, default=32, help="texts generated at once, at most (%(default)s)")


def _kind(settings: GenerationConfig, input_file: str | None) -> str:
    """The kind of generation; a file of prompts on the command line decides over the configuration."""
    kind = settings.text_gen_type
    if input_file is not None:
        if kind not in (None, "input-file"):
            print(
                f"note: prompts from {input_file} (-i), although text_gen_type is {kind}", file=sys.stderr, flush=True
            )
        return "input-file"
    if kind is None:
        raise UserError("text_gen_type is not set: unconditional, input-file or interactive (or give -i FILE)")
    if kind == "input-file" and settings.sample_input_file is None:
        raise UserError("text_gen_type is input-file, but no file is named: set sample_input_file, or give -i FILE")
    return kind


def read_prompts(path: str | Path, prompt_end: str) -> list[str]:
    """The prompts of a UTF-8 file, each ended by `prompt_end`; those of white space alone are left out.

    Where `prompt_end` is not a line's end itself, the line's end that follows it belongs to it. Raises UserError for a
    file that cannot be read or holds no prompt.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"cannot read the prompts in {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte 0x{error.object[error.start]:02x} at {error.start}); save it as UTF-8"
        ) from error
    prompts = split_prompts(text.replace("\r\n", "\n"), prompt_end)
    if not prompts:
        raise UserError(f"{path} holds no prompt: write one per line (or end each with prompt_end, {prompt_end!r})")
    return prompts


def split_prompts(text: str, prompt_end: str) -> list[str]:
    """The parts between the ends, without those of white space alone."""
    if not prompt_end:
        raise UserError(EMPTY_END)
    parts = text.split(prompt_end)
    if not prompt_end.endswith("\n"):
        parts = [part.removeprefix("\n") for part in parts]
    return [part for part in parts if part.strip()]


class Writer:
    """Continues texts as the configuration says; what it returns is GPT-NeoX's record of a sample."""

    def __init__(self, model: Any, tokenizer: Tokenizer, settings: GenerationConfig, seed: int, batch_size: int):
        self._model = model
        self._tokenizer = tokenizer
        self._settings = settings
        self._seed = seed
        self._batch_size = batch_size

    def write(self, contexts: Sequence[str], *, turn: int = 0, show_progress: bool = False) -> list[dict[str, Any]]:
        """One record per context, in order; an empty context begins with the end-of-document token.

        `turn` is added to the seed, so that a question asked again is answered anew.
        """
        settings, tokenizer = self._settings, self._tokenizer
        prompts = [tokens or [tokenizer.eod] for tokens in tokenizer.tokenize_batch(contexts)]
        console = Console(stderr=True)
        with (
            Progress(console=console, transient=True) if show_progress and console.is_terminal else nullcontext() as bar
        ):
            task = bar.add_task("generating", total=len(prompts)) if bar is not None else None
            generations = generate(
                self._model,
                prompts,
                maximum_tokens=settings.maximum_tokens,
                temperature=settings.temperature,
                top_k=settings.top_k,
                top_p=settings.top_p,
                seed=self._seed + turn,
                eod=tokenizer.eod,
                vocab_size=tokenizer.vocab_size,
                batch_size=self._batch_size,
                recompute=settings.recompute,
                on_generation=None if bar is None else lambda *_: bar.advance(task),
            )
        return [self._record(context, generation) for context, generation in zip(contexts, generations, strict=True)]

    def _record(self, context: str, generation: Generation) -> dict[str, Any]:
        return {
            "context": context,
            "text": self._tokenizer.detokenize(generation.tokens),
            "length": len(generation.tokens),
            "finished": generation.finished,
            "message": generation.message,
            "duration_seconds": round(generation.duration_seconds, 6),
        }


def interact(writer: Writer, prompt_end: str, source: IO[bytes] | None = None) -> None:
    """Continue each prompt that is typed (or piped in) until the input ends."""
    source = source or sys.stdin.buffer
    typed = source.isatty()
    if typed:
        print(f"Type a prompt, ended by {prompt_end!r}. Ctrl-D (end of input) ends.", flush=True)
    try:
        for turn, prompt in enumerate(_typed_prompts(source, prompt_end, ">>> " if typed else "")):
            record = writer.write([prompt], turn=turn)[0]
            print(record["text"], flush=True)
            if record["message"] is not None:
                print(f"note: {record['message']}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(flush=True)


def _typed_prompts(source: IO[bytes], prompt_end: str, mark: str) -> Iterator[str]:
    """Prompts as soon as they are complete; what stands before the end of the input is the last one."""
    held = ""
    while True:
        print(mark if not held else "", end="", flush=True)
        line = source.readline()
        try:
            held += line.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            raise UserError(f"the prompt is not UTF-8 text (byte 0x{error.object[error.start]:02x})") from error
        if not line:
            yield from split_prompts(held, prompt_end)
            return
        complete, end, rest = held.rpartition(prompt_end)
        if end:
            yield from split_prompts(complete, prompt_end)
            held = rest if rest.strip() else ""


def _save(records: list[dict[str, Any]], output: str) -> None:
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    if output == STANDARD_OUTPUT:
        sys.stdout.buffer.write(lines.encode())
        sys.stdout.flush()
        return
    write_atomically(Path(output), lines.encode())
    print(f"{len(records)} texts in {output}", flush=True)
