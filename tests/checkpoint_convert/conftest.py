"""transformers' cache of remote code in a folder of each test: exports of many methods share a name."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _remote_code_in_a_temporary_folder(tmp_path, monkeypatch):
    from transformers import dynamic_module_utils
    from transformers.utils import logging

    cache = str(tmp_path / "modules")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", cache)
    logging.disable_progress_bar()
    yield
    if cache in sys.path:
        sys.path.remove(cache)
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        del sys.modules[name]
