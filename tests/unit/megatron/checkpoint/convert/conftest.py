"""transformers' cache of remote code in a folder of each test: exports of many methods share a name."""

import sys

import pytest


def _forget_remote_code() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def _remote_code_in_a_temporary_folder(tmp_path, monkeypatch):
    from transformers import dynamic_module_utils
    from transformers.utils import logging

    # Neither what other tests of this process have loaded, nor where from.
    elsewhere = dynamic_module_utils.HF_MODULES_CACHE
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(elsewhere)])
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    _forget_remote_code()
    logging.disable_progress_bar()
    yield
    _forget_remote_code()
