"""Training runs that are killed: the imports are paid for once, each run is a fork of this script.

    python tests/support/kills.py FOLDER KILLS SEED

reads FOLDER/config.json, kills KILLS runs of it at random moments with SIGKILL, checks after each that the checkpoint
that `latest` names is whole, runs the last one to its end, and prints {"kills", "caught"} as JSON: how many runs were
killed, and how many of these kills fell into a save.
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
    """Train in a forked process, its output in `log`; returns its id."""
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
    """False if the run ended before it saved."""
    while b"saved " not in log.read_bytes():
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.005)
    return True


def main(folder: Path, kills: int, seed: int) -> None:
    settings = json.loads((folder / "config.json").read_text())
    directory, log = Path(settings["save"]), folder / "run.log"
    chance = random.Random(seed)
    caught = 0
    for _ in range(kills):
        child = fork_run(settings, log)
        if not wait_for_first_save(log, child):
            raise SystemExit(f"the run ended before it was killed:\n{log.read_text()}")
        time.sleep(chance.uniform(0.0, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        caught += any(path.name.startswith(".") or path.name.endswith(".unfinished") for path in directory.iterdir())
        if has_checkpoint(directory):
            step = find_step(directory)
            damage = find_damage(step)
            if damage or read_manifest(step) is None:
                raise SystemExit(f"after a kill: {damage or 'no manifest'}")
    child = fork_run({**settings, "save_interval": None}, log)
    if os.waitpid(child, 0)[1]:
        raise SystemExit(log.read_text())
    print(json.dumps({"kills": kills, "caught": caught}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
