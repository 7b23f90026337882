"""Upload an exported folder, as GPT-NeoX's tool does: python tools/ckpts/upload.py FOLDER ORG/NAME BRANCH"""

import sys
from pathlib import Path

# Replaces this script's folder, where inspect.py would shadow the standard library's module.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import check_megatron  # noqa: F401
from megatron.convert.hub import upload
from megatron.utils.command_line import OptionParser, run_main
from megatron.utils.errors import UserError


def main() -> None:
    """Raises UserError if the folder contains no model, or the upload fails."""
    parser = OptionParser(description=__doc__)
    parser.add_argument("folder", metavar="FOLDER", help="written by convert.py to-hf")
    parser.add_argument("repository", metavar="ORG/NAME", help="created, if it does not exist")
    parser.add_argument("branch", metavar="BRANCH", nargs="?", help="created, if it does not exist (default: main)")
    options = parser.parse_args()
    if not (Path(options.folder) / "config.json").is_file():
        raise UserError(f"{options.folder}: has no config.json; give a folder that convert.py to-hf has written")
    print(f"uploaded to {upload(options.folder, options.repository, branch=options.branch)}")


if __name__ == "__main__":
    sys.exit(run_main(main))
