"""The file of published numbers: complete, well-formed, and known methods."""

import re
from dataclasses import replace

import pytest

from kerple.positional import registered_names
from megatron.reporting.published import names, published
from megatron.reporting.results import Setting, kind_of

NUMBER = r"\d+(\.\d+)?"
CELL = re.compile(rf"{NUMBER}( ± {NUMBER})?( †)?|OOM")


@pytest.mark.parametrize("name", names())
def test_every_row_has_a_value_per_length_and_a_name(name):
    table = published(name)
    assert table.source.startswith(("KERPLE (arXiv 2205.09921)", "DAPE (arXiv 2405.14722)", "LEX (arXiv 2212.10554)"))
    assert list(table.lengths) == sorted(set(table.lengths))
    for methods in table.values.values():
        for method, texts in methods.items():
            assert method in table.methods
            assert len(texts) == max(1, len(table.lengths))
            assert all(CELL.fullmatch(text) for text in texts), texts


def test_kerple_s_tables_have_the_paper_s_size():
    three, five, six = (published(f"kerple-{number}") for number in (3, 5, 6))
    for table, methods in ((three, 6), (five, 2)):
        assert list(table.values) == ["openwebtext2", "github", "arxiv"]
        assert table.lengths == (512, 1024, 2048, 4096, 8192, 16384)
        assert all(len(found) == methods == len(table.methods) for found in table.values.values())
    daggers = [text for found in three.values.values() for texts in found.values() for text in texts if "†" in text]
    assert len(daggers) == 64
    assert not any("†" in text for found in three.values.values() for text in found["kerple_log", "full"])
    assert six.values == {}, "no number of Table 6 is known here"


def test_some_numbers():
    assert published("kerple-3").value("GitHub", ("kerple_log", "full"), 16384) == "2.75 ± 0.16"
    assert published("kerple-5").value("arxiv", ("kerple_log3", "full"), 8192) == "5.00 ± 0.11"
    assert published("kerple-4").value("github", ("rpe", "full"), None) == "0.340"
    assert published("dape").value("arxiv", ("dape_kerple", "full"), 8192) == "3.86"
    assert published("dape").value("arxiv", ("rotary", "full"), 1024) == "45.20"
    assert published("lex").value("arxiv", ("xpos", "blockwise@1024"), 4096) == "15.19"
    assert published("lex-modes").value("pg22", ("xpos", "window@1024"), 8192) == "24.61"
    assert published("kerple-3").value("books3", ("kerple_log", "full"), 512) is None
    assert published("kerple-3").value("github", ("kerple_log", "full"), 256) is None


def test_protocols_and_names():
    same = Setting("github", 512, "non-overlapping", (12, 768))
    assert published("kerple-3").serves(same)
    assert published("kerple-3").serves(replace(same, protocol="kerple@320"))
    for other in ({"protocol": "kerple@8"}, {"train_length": 256}, {"model": (24, 1024)}, {"model": None}):
        assert not published("kerple-3").serves(replace(same, **other))
    assert published("dape").serves(replace(same, protocol="last-k@256"))
    assert not published("dape").serves(replace(same, protocol="last-k@128"))
    three = published("kerple-3")
    assert three.name(("kerple_log", "full")) == "KERPLE (log)"
    assert three.name(("kerple_log", "window@512")) == "KERPLE (log), window@512"
    assert three.name(("a_new_method", "full")) == "a_new_method"
    assert published("lex").name(("xpos", "blockwise")) == "LEX"
    assert kind_of(("alibi", "window@64")) == ("alibi", "window")


def test_kerple_s_methods_are_methods_of_this_project():
    wanted = {pos_emb for number in (3, 4, 5, 6) for pos_emb, _ in published(f"kerple-{number}").methods}
    assert wanted <= set(registered_names())
