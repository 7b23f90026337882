"""tools/report.py: tables and figures from folders of results."""

from collections.abc import Sequence
from pathlib import Path

from kerple.positional.registry import canonical_name
from megatron.config.command_line import OptionParser
from megatron.evaluation.records import RESULTS, read_results
from megatron.reporting.report import TITLE, Sources, write_report
from megatron.reporting.results import Method, method_of
from megatron.reporting.tables import REFERENCE
from megatron.utils.errors import UserError

DESCRIPTION = "The tables and figures of the KERPLE, DAPE and LEX papers, and an HTML report, from stored results."


def main(argv: Sequence[str] | None = None) -> None:
    """Read, write, print where the report is. Raises UserError."""
    parser = OptionParser(prog="report.py", description=DESCRIPTION)
    parser.add_argument(
        "results",
        nargs="*",
        type=Path,
        metavar="RESULTS",
        help=f"folders of evaluations, or folders that hold such anywhere below them (each has a {RESULTS})",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the report")
    parser.add_argument(
        "--checkpoint",
        nargs="+",
        type=Path,
        default=[],
        metavar="DIR",
        help="further checkpoints whose kernels are drawn, the release's among them",
    )
    parser.add_argument(
        "--benchmark", nargs="+", type=Path, default=[], metavar="FILE", help="JSON of benchmarks/train_step.py"
    )
    parser.add_argument(
        "--reference",
        metavar="POS_EMB",
        help=f"the method that others are tested against: † marks where it is significantly better ({REFERENCE[0]})",
    )
    parser.add_argument("--title", default=TITLE, help="of the report (%(default)s)")
    options = parser.parse_args(argv)
    if not (options.results or options.checkpoint or options.benchmark):
        raise UserError("nothing to report: give folders of results, or --checkpoint, or --benchmark")
    sources = Sources(read_results(options.results, strict=False), options.checkpoint, options.benchmark)
    path = write_report(sources, options.output, options.title, _reference(options.reference, sources))
    for note in sources.notes:
        print(f"note: {note}", flush=True)
    print(path, flush=True)


def _reference(name: str | None, sources: Sources) -> Method:
    """Raises UserError for a method of which there are no results."""
    if name is None:
        return REFERENCE
    method = canonical_name(name), "full"
    known = dict.fromkeys(method_of(record)[0] for record in sources.records if record["kind"] == "extrapolation")
    if method[0] not in known:
        raise UserError(f"--reference {name}: there are no results of it; choose one of {', '.join(known) or 'none'}")
    return method
