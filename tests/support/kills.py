"""Training runs that are killed with SIGKILL. Each one is a fork of this script, so that modules are imported only
once.

    python tests/support/kills.py FOLDER KILLS SEED

trains FOLDER/config.json and kills it at random moments, KILLS times. After each kill it checks that the checkpoint
that `latest` names is complete. It then trains to the end and prints {"kills": K, "during_save": N} as JSON, where N is
the number of kills during a save.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from megatron.checkpoint.directory import find_damage, find_step, has_checkpoint, read_manifest
from megatron.config import Config
from megatron.training.loop import train


def fork_run(settings: dict[str, object], log: Path) -> int:
    """Train in a forked process with its output in `log`; returns its id."""
    log.write_bytes(b"")
    child = os.fork()
    if child:
        return child
    descriptor = os.open(log, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    status = 1
    try:
        train(Config.from_flat(settings))
        status = 0
    except BaseException as error:
        print(f"failed: {error!r}", flush=True)
    finally:
        os._exit(status)


def wait_for_first_save(log: Path, child: int) -> bool:
    """Returns False if the run ended before its first save."""
    while b"saved " not in log.read_bytes():
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.005)
    return True


def main(folder: Path, kills: int, seed: int) -> None:
    settings = json.loads((folder / "config.json").read_text())
    directory, log = Path(settings["save"]), folder / "run.log"
    generator = random.Random(seed)
    during_save = 0
    for _ in range(kills):
        child = fork_run(settings, log)
        if not wait_for_first_save(log, child):
            raise SystemExit(f"the run ended before its first save:\n{log.read_text()}")
        time.sleep(generator.uniform(0.0, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        during_save += any(
            path.name.startswith(".") or path.name.endswith(".unfinished") for path in directory.iterdir()
        )
        if has_checkpoint(directory):
            step = find_step(directory)
            damage = find_damage(step)
            if damage or read_manifest(step) is None:
                raise SystemExit(f"after a kill: {damage or 'no manifest'}")
    child = fork_run({**settings, "save_interval": None}, log)
    if os.waitpid(child, 0)[1]:
        raise SystemExit(log.read_text())
    print(json.dumps({"kills": kills, "during_save": during_save}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
