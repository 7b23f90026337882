"""`kerple report`: the tables and figures of the papers, from stored evaluation results."""

from collections.abc import Sequence
from pathlib import Path

from kerple.positional.registry import PluginError, load_plugin
from megatron.evaluation.records import RESULTS, read_results
from megatron.reporting.aggregate import Method
from megatron.reporting.formatting import TITLE
from megatron.reporting.paper_tables import REFERENCE
from megatron.reporting.report import Sources, primary_name, write_report
from megatron.utils.command_line import OptionParser, path_option
from megatron.utils.errors import UserError, first_line
from megatron.utils.files import check_writable

DESCRIPTION = (
    "Write the tables and figures of the KERPLE, DAPE and LEX papers from stored evaluation "
    "results, as an HTML report and as separate files."
)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the report and print its path. Raises UserError."""
    # What the report shows.
    parser = OptionParser(description=DESCRIPTION)
    parser.add_argument(
        "results",
        nargs="*",
        type=Path,
        metavar="RESULTS",
        help=f"folders that contain {RESULTS} (written by evaluate.py), directly or in subfolders",
    )
    parser.add_argument(
        "--output", required=True, type=Path, metavar="DIR", help="folder for the report"
    )
    parser.add_argument(
        "--checkpoint",
        nargs="+",
        type=Path,
        default=[],
        metavar="DIR",
        help="more checkpoints whose biases and weights to plot, of this project or the KERPLE "
        "release",
    )
    parser.add_argument(
        "--pos-emb-module",
        type=path_option,
        metavar="FILE",
        help="file or module that registers your own method",
    )

    # How it shows it.
    parser.add_argument(
        "--reference",
        metavar="POS_EMB",
        help="show the loss of every other method minus that of POS_EMB, and mark with † the "
        f"methods that POS_EMB significantly improves on (default: {REFERENCE.pos_emb})",
    )
    parser.add_argument("--title", default=TITLE, help="title of the report (default: %(default)s)")

    # Find mistakes before the sources are read, which takes time.
    options = parser.parse_args(argv)
    if not (options.results or options.checkpoint):
        raise UserError("nothing to report: give folders with results, or --checkpoint")
    check_writable(options.output, "--output")
    if options.pos_emb_module is not None:
        try:
            load_plugin(options.pos_emb_module)
        except PluginError as error:
            raise UserError(f"--pos-emb-module {error}") from error
        except Exception as error:  # the module is the user's own code
            problem = f"{type(error).__name__}: {first_line(error)}"
            raise UserError(f"--pos-emb-module {options.pos_emb_module}: {problem}") from error
    sources = Sources(read_results(options.results), options.checkpoint)

    # The figures of weights.
    from megatron.plots.checkpoints import add_weight_figures  # imports torch and the model

    add_weight_figures(sources)

    # The method to compare with must have results.
    reference = REFERENCE
    if options.reference is not None:
        reference = Method(primary_name(options.reference))
        losses = [record for record in sources.records if record["kind"] == "extrapolation"]
        evaluated = dict.fromkeys(record["pos_emb"] for record in losses)
        if reference.pos_emb not in evaluated:
            raise UserError(
                f"--reference {options.reference}: there are no results of this method; choose one "
                f"of {', '.join(evaluated) or 'none'}"
            )

    # The report, and what it leaves out.
    path = write_report(sources, options.output, options.title, reference)
    for note in sources.notes:
        print(f"note: {note}", flush=True)
    print(path, flush=True)
