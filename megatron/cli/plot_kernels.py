"""tools/plot_kernels.py: the page and pictures of all positional methods."""

from collections.abc import Sequence

from megatron.plots.kernels import write_page
from megatron.utils.command_line import OptionParser

DESCRIPTION = (
    "Plot the bias and weight of every positional method by distance, and write the page that shows the plots. Methods "
    "with a checkpoint (`make pictures` writes runs/pictures/METHOD/checkpoints) are also plotted after training."
)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page and the pictures. Raises UserError."""
    parser = OptionParser(description=DESCRIPTION)
    parser.add_argument(
        "--output",
        default="runs/plots/positional-methods.md",
        metavar="FILE",
        help="the page; the pictures go into pictures/ next to it (default: %(default)s)",
    )
    parser.add_argument(
        "--checkpoint", nargs="+", default=[], metavar="DIR", help="checkpoint folders, one per positional method"
    )
    options = parser.parse_args(argv)
    paths = write_page(options.output, options.checkpoint)
    print(f"wrote {paths[0]} and {len(paths) - 1} pictures")
