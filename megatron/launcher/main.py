"""deepy.py from command line to exit status."""

import os
from collections.abc import Sequence

from megatron.config import load_config
from megatron.config.arguments import print_notices
from megatron.launcher.command import ReservedPort, launcher_command, launcher_environment, with_addresses
from megatron.launcher.command_line import USAGE, parse_command_line
from megatron.launcher.resources import check_launcher, find_resources
from megatron.launcher.supervision import run_to_end


def main(words: Sequence[str]) -> int:
    """Start what the words of a command line ask for, and return its exit status.

    Raises UserError before anything is started if the configuration, or what it asks of this machine, is wrong.
    """
    request = parse_command_line(words)
    if request is None:
        print(USAGE)
        return 0
    config = load_config(request.files, request.config_dir, request.overrides)
    print_notices(config)
    resources = find_resources(config)
    check_launcher(config, resources)
    copies = config.parallel.data_parallel_size(resources.world_size)
    if config.batch.given:
        config.batch.resolve(copies)
    print(f"deepy: {resources.describe()}", flush=True)
    environment, notes = launcher_environment(resources, os.environ)
    for note in notes:
        print(f"deepy: {note}", flush=True)
    with ReservedPort() as port:
        config = with_addresses(config, resources, port.number)
        return run_to_end(launcher_command(config, resources, request.script, request.script_options), environment)
