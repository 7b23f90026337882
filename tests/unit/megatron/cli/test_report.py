"""The command line of `kerple report`."""

import json

from megatron.cli.report import main
from tests.support.errors import assert_rejected
from tests.support.records import record, seeds, stored_record


def write_results(folder, records):
    folder.mkdir(parents=True)
    (folder / "results.jsonl").write_text(
        "".join(json.dumps({**stored_record(), **result}) + "\n" for result in records)
    )


def test_report_of_several_folders(tmp_path, capsys):
    for name, base in {"kerple_log": 3.0, "t5": 3.1}.items():
        write_results(
            tmp_path / "runs" / name / "evaluation", seeds(f"{name} (a)", 512, [base, base + 0.2])
        )
    main(
        [
            str(tmp_path / "runs"),
            "--output",
            str(tmp_path / "out"),
            "--title",
            "Mine",
            "--reference",
            "t5 (a)",
        ]
    )
    *notes, path = capsys.readouterr().out.splitlines()
    assert path == str(tmp_path / "out" / "report.html")
    assert len(notes) == 2
    assert all(
        note.startswith("note: No kernels are plotted for ") and ": no such folder" in note
        for note in notes
    )
    assert "<title>Mine</title>" in (tmp_path / "out" / "report.html").read_text()


def test_a_folder_that_is_not_writable_is_found_before_results_are_read(tmp_path):
    (tmp_path / "file").write_text("")
    assert_rejected(
        "--output.*file/out",
        main,
        [str(tmp_path / "nowhere"), "--output", str(tmp_path / "file" / "out")],
    )


def test_invalid_arguments_and_results_are_rejected(tmp_path):
    output = ["--output", str(tmp_path / "out")]
    assert_rejected("nothing to report", main, output)
    (tmp_path / "empty").mkdir()
    assert_rejected(r"empty.*results\.jsonl", main, [str(tmp_path / "empty"), *output])
    write_results(tmp_path / "bad", [])
    (tmp_path / "bad" / "results.jsonl").write_text("no JSON\n")
    assert_rejected(r"results\.jsonl.*1", main, [str(tmp_path / "bad"), *output])
    write_results(tmp_path / "good", [record("alibi", 512, 3.0)])
    assert_rejected("--reference t5", main, [str(tmp_path / "good"), "--reference", "t5", *output])
    module = ["--pos-emb-module", str(tmp_path / "mine.py")]
    assert_rejected(
        r"--pos-emb-module .*mine\.py: no such file",
        main,
        [str(tmp_path / "good"), *module, *output],
    )
    (tmp_path / "mine.py").write_text("1 / 0")
    assert_rejected(
        r"mine\.py, line 1: ZeroDivisionError: division by zero",
        main,
        [str(tmp_path / "good"), *module, *output],
    )
    assert not (tmp_path / "out").exists()
