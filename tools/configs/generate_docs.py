"""Write configs/neox_arguments.md from the declarations of the keys; with --check, only say whether it is current."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.config.command_line import OptionParser  # noqa: E402
from megatron.config.generate_docs import generate  # noqa: E402

DOCUMENT = ROOT / "configs" / "neox_arguments.md"


def main() -> int:
    parser = OptionParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file is not current")
    options = parser.parse_args()
    text = generate()
    if options.check:
        current = DOCUMENT.is_file() and DOCUMENT.read_text(encoding="utf-8") == text
        print(f"{DOCUMENT.relative_to(ROOT)} is {'current' if current else 'not current: run ' + sys.argv[0]}")
        return 0 if current else 1
    temporary = DOCUMENT.with_suffix(".md.new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, DOCUMENT)
    print(f"wrote {DOCUMENT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
