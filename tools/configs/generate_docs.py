"""Generate configs/neox_arguments.md from the declarations of the keys."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import check_megatron  # noqa: F401
from megatron.config.generate_docs import generate
from megatron.utils.command_line import OptionParser, run_main
from megatron.utils.files import write_atomically

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "configs" / "neox_arguments.md"


def main() -> None:
    OptionParser(description=__doc__).parse_args()
    write_atomically(DOCUMENT, generate().encode())
    print(f"wrote {DOCUMENT.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(run_main(main))
