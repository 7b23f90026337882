"""The command line of `kerple convert`; tests/integration/test_checkpoint_tools.py converts checkpoints."""

import pytest

from megatron.cli.convert import main
from megatron.config import UserError


def test_an_existing_folder_is_not_overwritten(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}"):
        main(["from-hf", str(tmp_path), str(tmp_path)])
