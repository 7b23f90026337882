"""Generate docs/results from the records of the replication."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import check_megatron  # noqa: F401
from experiments.replication.pages import add_results, write_pages
from megatron.utils.command_line import run_main

ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None) -> None:
    """Copy the records in the given folders, write the pages and print their paths."""
    parser = argparse.ArgumentParser(
        description="Generate docs/results from the records of the replication."
    )
    parser.add_argument(
        "results",
        nargs="*",
        type=Path,
        metavar="RESULTS",
        help="folders of sweeps whose records to copy first",
    )
    for folder in parser.parse_args(argv).results:
        add_results(folder)
    for path in write_pages(ROOT):
        print(path.relative_to(ROOT), flush=True)


if __name__ == "__main__":
    sys.exit(run_main(main))
