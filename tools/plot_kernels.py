"""Draw the bias and the weight of every positional method over distance, and write the page that shows them.

python tools/plot_kernels.py [--output docs/positional-methods.md] [--checkpoint DIR ...]

With checkpoints (the demonstration's are runs/demo/METHOD/checkpoints) each method is drawn after training too.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.config import UserError  # noqa: E402
from megatron.config.command_line import OptionParser  # noqa: E402
from megatron.reporting.kernel_plots import write_page  # noqa: E402


def main() -> int:
    parser = OptionParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="docs/positional-methods.md", metavar="FILE", help="(%(default)s)")
    parser.add_argument("--checkpoint", nargs="+", default=[], metavar="DIR", help="folders that hold `latest`")
    options = parser.parse_args()
    try:
        written = write_page(options.output, options.checkpoint)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {written[0]} and {len(written) - 1} pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
