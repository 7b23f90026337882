"""What evaluate.py prints and writes next to the records."""

import matplotlib.image

from megatron.reporting.summary import write_summary
from tests.support.errors import assert_rejected
from tests.support.records import passkey_record, record

LENGTHS = (512, 1024)


def records():
    """Two methods; positions of `learned` end at 512."""
    losses = [record("kerple_log", length, 3.5 - length / 1e4) for length in LENGTHS]
    losses += [
        record("learned", 512, 3.25),
        record("learned", 1024, None, note="positions end at 511"),
    ]
    resolutions = [
        {
            **record("kerple_log", 512, 3.0),
            "kind": "resolution",
            "protocol": "first@8",
            "resolution": 0.625,
        }
    ]
    return (
        losses + resolutions + [passkey_record("kerple_log", 512, depth, 0.3) for depth in (0, 1)]
    )


def test_printed_tables_and_files(tmp_path, capsys):
    modes = [record("kerple_log", length, 3.4, mode="window@512") for length in LENGTHS]
    paths = write_summary([*records(), *modes], tmp_path)
    printed = capsys.readouterr().out
    for expected in (
        "KERPLE (log)",
        "3.449",
        "3.398",
        "0.6250",
        "30%",
        "n/a: learned at 1,024: positions end at 511.",
    ):
        assert expected in printed
    assert [path.name for path in paths] == [
        "extrapolation.md",
        "extrapolation-github-12x768-512-non-overlapping.png",
        "modes-github-12x768-512-non-overlapping.png",
    ]
    assert sorted(tmp_path.iterdir()) == sorted(paths), "no temporary files are left"
    text = paths[0].read_text()
    titles = [line for line in text.splitlines() if line.startswith("# ")]
    assert len(titles) == 3, "perplexity, attention resolution, passkey retrieval"
    assert "| **GitHub, window@512** |  |  |" in text
    assert "| learned | **3.250** | n/a |" in text
    assert "paper |" not in text.partition(titles[1])[0], "published values are only in the report"
    for path in paths[1:]:
        assert matplotlib.image.imread(path).shape[1] > 900


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    assert_rejected(r"file/extrapolation\.md", write_summary, records(), tmp_path / "file")
