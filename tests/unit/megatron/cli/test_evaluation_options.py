"""Options of evaluate.py that a sweep checks before any run is trained."""

import pytest

from megatron.cli.evaluation_options import check_run
from megatron.config import Config
from megatron.utils.errors import UserError
from tests.support.checkpoints import write_corpus


def test_options_are_checked_without_a_checkpoint(tmp_path):
    data = write_corpus(tmp_path)
    keys = {"data-path": str(data), "seq-length": 32, "split": "1,1,0", "max-position-embeddings": 32}
    config = Config.from_flat({**keys, "num-layers": 1, "hidden-size": 8, "num-attention-heads": 2})
    good = ["--lengths", "32", "--modes", "window@8", "--protocol", "last-k@16", "--precision", "bf16"]
    check_run(good, config, "sweep.yml", has_data=True)
    check_run(["--lengths", str(1 << 30)], config, "sweep.yml", has_data=False)
    for words, message in (
        (["--lengths", "x"], "sweep.yml: argument --lengths: must be an integer from 1"),
        (["--modes", "sliding"], "'sliding' is unknown"),
        (["--lengths", str(1 << 30)], "is shorter|too short|has only"),
    ):
        with pytest.raises(UserError, match=message):
            check_run(words, config, "sweep.yml", has_data=True)
