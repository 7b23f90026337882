"""Hostile checkpoints, archives, Hugging Face folders and tokenizers end in success or in one error line."""

import shutil

from megatron.cli import convert, import_release, inspect
from megatron.config.command_line import run_main
from megatron.convert.output import new_folder
from tests.support.hostile_checkpoints import CONVERT, IMPORT, INSPECT, cases, problems

MAINS = {INSPECT: inspect.main, CONVERT: convert.main, IMPORT: import_release.main}


def test_hostile_checkpoints(tmp_path, capfd):
    found = {}
    for case in cases(tmp_path, seed=7, count=48):
        script, *arguments = case.command
        status = run_main(lambda script=script, arguments=arguments: MAINS[script](arguments))
        if wrong := problems(case, status, capfd.readouterr().err):
            found[case.name] = wrong
        shutil.rmtree(case.folder)
    assert not found


def test_problems_are_found(tmp_path):
    case = next(cases(tmp_path, seed=7, count=1))
    assert problems(case, 2, "error: the file is damaged\n") == []
    (case.folder / "escaped").touch()
    errors = "Traceback\nset weights_only=False \x1b[31m"
    assert len(problems(case, 70, errors)) == 5
    with new_folder(case.folder / "out"):
        pass
    assert "left output behind" in problems(case, 2, "error: x")
