"""The command line of `kerple convert`; tests/integration/test_checkpoint_tools.py converts
checkpoints.
"""

from megatron.cli.convert import main
from tests.support.errors import assert_rejected


def test_an_existing_folder_is_not_overwritten(tmp_path):
    assert_rejected(f"{tmp_path}", main, ["from-hf", str(tmp_path), str(tmp_path)])
