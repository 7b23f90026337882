"""A Slurm job array that runs a sweep: all tasks run the same command, and share the runs by claiming them."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron.sweep.definition import Sweep
from megatron.utils.errors import UserError

SECONDS_TO_SAVE = 300


def array_script(command: Sequence[str], sweep: Sweep, tasks: int, options: str) -> str:
    """The script for sbatch.

    Slurm sends SIGTERM `SECONDS_TO_SAVE` before the time limit and at preemption. The runs then save, and the task asks
    Slurm to queue it again.

    Args:
        command: the command that runs the sweep.
        tasks: number of array tasks.
        options: options of sbatch, separated as in a shell.

    Raises UserError if `options` is not a list of options.
    """
    # Each option of the user becomes one #SBATCH line.
    try:
        extra = shlex.split(options)
    except ValueError as error:
        raise UserError(f"--slurm-options {options}: {error}") from None
    if not all(word.startswith("-") and "\n" not in word for word in extra):
        raise UserError(f"--slurm-options {options}: write each option as --NAME=VALUE")
    folder, log = str(Path.cwd()), str(sweep.output.absolute()).replace("%", "%%") + "/slurm-%A_%a.log"

    # The options of the job.
    lines = [
        f"--job-name={shlex.quote(sweep.title)}",
        f"--array=1-{tasks}",
        f"--chdir={shlex.quote(folder)}",
        f"--output={shlex.quote(log)}",
        "--open-mode=append",
        f"--signal=B:TERM@{SECONDS_TO_SAVE}",
        "--requeue",
        *map(shlex.quote, extra),
    ]

    # The script waits in the background for the sweep, so that bash can handle SIGTERM.
    return "\n".join(
        [
            "#!/bin/bash",
            "# Every task works on runs that no other task has claimed. Tasks may be added or cancelled at any time.",
            *(f"#SBATCH {line}" for line in lines),
            "",
            f"{shlex.join(command)} &",
            "sweep=$!",
            "trap 'stopped=1; kill -TERM $sweep' TERM",
            "wait $sweep",
            "status=$?",
            "# A signal ends `wait` while the sweep still saves.",
            "while kill -0 $sweep 2>/dev/null; do",
            "  wait $sweep",
            "  status=$?",
            "done",
            'if [ -n "$stopped" ]; then',
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            "exit $status",
            "",
        ]
    )
