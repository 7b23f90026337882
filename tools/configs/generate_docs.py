"""Generate configs/neox_arguments.md from the declarations of the keys (--check: only test that it is up to date)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import check_megatron  # noqa: F401
from megatron.config.generate_docs import generate
from megatron.utils.command_line import OptionParser, run_main
from megatron.utils.files import write_atomically

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "configs" / "neox_arguments.md"


def main() -> int:
    parser = OptionParser(description="Generate configs/neox_arguments.md from the declarations of the keys.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file is out of date")
    options = parser.parse_args()
    text = generate()
    name = DOCUMENT.relative_to(ROOT)
    if not options.check:
        write_atomically(DOCUMENT, text.encode())
        print(f"wrote {name}")
        return 0
    if DOCUMENT.is_file() and DOCUMENT.read_text(encoding="utf-8") == text:
        print(f"{name} is up to date")
        return 0
    print(f"{name} is out of date: run python tools/configs/generate_docs.py")
    return 1


if __name__ == "__main__":
    sys.exit(run_main(main))
