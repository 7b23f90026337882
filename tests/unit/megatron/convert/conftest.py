"""Each test has its own transformers cache for remote code: exports of all methods have the same
module names.
"""

import sys

import pytest


def _unload_remote_code() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def _remote_code_in_a_temporary_folder(tmp_path, monkeypatch):
    from transformers import dynamic_module_utils
    from transformers.utils import logging

    # Modules that other tests have loaded, and the folder they came from, must not be found.
    shared_cache = dynamic_module_utils.HF_MODULES_CACHE
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(shared_cache)])
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    _unload_remote_code()
    logging.disable_progress_bar()
    yield
    _unload_remote_code()
