"""Two ranks: one builds the indices while the other waits, both read the same, and fail together."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import datetime, itertools, json, sys, time
import torch
from megatron.config.errors import UserError
from megatron.data import build_loader
from megatron.data import index_cache, samples
from megatron.data.datasets import datasets_from_split
from megatron.data.samples import SampleSettings

rank, rendezvous, prefix, fault = int(sys.argv[1]), *sys.argv[2:]
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
)
built = []
real = index_cache._build
def build(folder, make):
    time.sleep(0.5)
    built.append(folder.name)
    if fault == "fault":
        raise UserError("the disk is on fire")
    real(folder, make)
index_cache._build = build
result = {"built": built}
try:
    train = datasets_from_split(prefix, "9,1", (16,) * 3, (200, 10, 0), SampleSettings(1000, 0, 1)).train
    loader = build_loader(train, micro_batch_size=2, data_parallel_rank=rank, data_parallel_size=2)
    result["order"] = train.order
    result["rows"] = [row for batch in itertools.islice(loader, 20) for row in batch["tokens"].tolist()]
except UserError as error:
    result["error"] = str(error)
torch.distributed.destroy_process_group()
print(json.dumps(result))
"""


def run_two(tmp_path, prefix, fault="") -> list[dict]:
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, str(rank), str(tmp_path / "rendezvous"), prefix, fault],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    return [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in processes]


def test_one_builds_both_read(tmp_path, corpus):
    first, second = run_two(tmp_path, corpus)
    assert len(first["built"]) == 2  # train and valid
    assert second["built"] == []
    assert first["order"] == second["order"]
    from itertools import islice

    from megatron.data import build_loader
    from megatron.data.datasets import datasets_from_split
    from megatron.data.samples import SampleSettings

    train = datasets_from_split(corpus, "9,1", (16,) * 3, (200, 10, 0), SampleSettings(1000, 0, 1)).train
    alone = [row for batch in islice(build_loader(train, micro_batch_size=4), 20) for row in batch["tokens"].tolist()]
    together = np.stack([np.reshape(ranks["rows"], (20, 2, 16)) for ranks in (first, second)], axis=1)
    assert together.reshape(80, 16).tolist() == alone


@pytest.mark.parametrize("fault", ["fault"])
def test_both_fail_when_the_builder_fails(tmp_path, corpus, fault):
    for result in run_two(tmp_path, corpus, fault):
        assert result["error"] == "the disk is on fire"
