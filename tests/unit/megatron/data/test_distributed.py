"""Two ranks: one builds the indices while the other waits, both read the same, and fail together."""

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np

from megatron.data import build_loader
from megatron.data.datasets import datasets_from_split
from megatron.data.samples import SampleSettings

ROOT = Path(__file__).parents[4]

PROGRAM = """
import datetime, itertools, json, sys, time
import torch
from megatron.utils.errors import UserError
from megatron.data import build_loader
from megatron.data import index_cache
from megatron.data.datasets import datasets_from_split
from megatron.data.samples import SampleSettings

rank, rendezvous, prefix = int(sys.argv[1]), *sys.argv[2:]
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
)
real = index_cache._build
result = {"built": []}

def train_data():
    return datasets_from_split(prefix, "9,1", (16,) * 3, (200, 10, 0), SampleSettings(1000, 0, 1)).train

def failing(folder, make):
    raise UserError("the disk is on fire")

def slow(folder, make):
    time.sleep(0.5)
    result["built"].append(folder.name)
    real(folder, make)

index_cache._build = failing
try:
    train_data()
except UserError as error:
    result["error"] = str(error)
index_cache._build = slow
train = train_data()
loader = build_loader(train, micro_batch_size=2, data_parallel_rank=rank, data_parallel_size=2)
result["order"] = train.order
result["rows"] = [row for batch in itertools.islice(loader, 20) for row in batch["tokens"].tolist()]
torch.distributed.destroy_process_group()
print(json.dumps(result))
"""


def run_two(tmp_path, prefix) -> list[dict]:
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, str(rank), str(tmp_path / "rendezvous"), prefix],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    return [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in processes]


def test_both_fail_then_one_builds_and_both_read(tmp_path, corpus):
    first, second = run_two(tmp_path, corpus)
    assert first["error"] == second["error"] == "the disk is on fire"
    assert len(first["built"]) == 2  # train and valid
    assert second["built"] == []
    assert first["order"] == second["order"]
    train = datasets_from_split(corpus, "9,1", (16,) * 3, (200, 10, 0), SampleSettings(1000, 0, 1)).train
    alone = [row for batch in islice(build_loader(train, micro_batch_size=4), 20) for row in batch["tokens"].tolist()]
    together = np.stack([np.reshape(ranks["rows"], (20, 2, 16)) for ranks in (first, second)], axis=1)
    assert together.reshape(80, 16).tolist() == alone
