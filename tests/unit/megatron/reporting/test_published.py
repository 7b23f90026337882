"""published.yml: complete, well-formed, with known methods."""

import re
from dataclasses import replace

import pytest

from megatron.reporting.aggregate import Method, Setting
from megatron.reporting.published import (
    corpus_name,
    corpus_sort_key,
    display_name,
    line_numbers,
    load_published,
    published_tables,
)

NUMBER = r"\d+(\.\d+)?"
CELL = re.compile(rf"{NUMBER}( ± {NUMBER})?( †)?|OOM")


@pytest.mark.parametrize("name", published_tables())
def test_every_row_has_a_value_per_length_and_a_name(name):
    table = load_published(name)
    assert table.source.startswith(
        ("KERPLE (arXiv 2205.09921)", "DAPE (arXiv 2405.14722)", "LEX (arXiv 2212.10554)")
    )
    assert list(table.lengths) == sorted(set(table.lengths))
    for methods in table.values.values():
        for method, texts in methods.items():
            assert method in table.methods
            assert len(texts) == max(1, len(table.lengths))
            assert all(CELL.fullmatch(text) for text in texts), texts


def test_size_of_kerple_s_tables():
    three, five, six = (load_published(f"kerple-{number}") for number in (3, 5, 6))
    for table, num_methods in ((three, 6), (five, 2)):
        assert list(table.values) == ["openwebtext2", "github", "arxiv"]
        assert table.lengths == (512, 1024, 2048, 4096, 8192, 16384)
        assert all(
            len(methods) == num_methods == len(table.methods) for methods in table.values.values()
        )
    cells = [
        text for methods in three.values.values() for texts in methods.values() for text in texts
    ]
    assert len(cells) == 108
    assert sum("†" in text for text in cells) == 64
    assert not any(
        "†" in text for methods in three.values.values() for text in methods[Method("kerple_log")]
    )
    assert six.values == {}, "the values of Table 6 are not known"


def test_values_are_those_printed_in_the_papers():
    assert load_published("kerple-3").value("GitHub", Method("kerple_log"), 16384) == "2.75 ± 0.16"
    assert load_published("kerple-5").value("arxiv", Method("kerple_log3"), 8192) == "5.00 ± 0.11"
    assert load_published("kerple-4").value("github", Method("rpe"), None) == "0.340"
    assert load_published("dape").value("arxiv", Method("dape_kerple"), 8192) == "3.86"
    assert load_published("dape").value("arxiv", Method("rotary"), 1024) == "45.20"
    assert load_published("lex").value("arxiv", Method("xpos", "blockwise"), 4096) == "15.19"
    assert load_published("lex-modes").value("pg22", Method("xpos", "window@1024"), 8192) == "24.61"
    assert load_published("kerple-3").value("books3", Method("kerple_log"), 512) is None
    assert load_published("kerple-3").value("github", Method("kerple_log"), 256) is None
    assert load_published("kerple-3").value(None, Method("kerple_log"), 512) is None


def test_comparable_settings():
    setting = Setting("github", 512, "non-overlapping", (12, 768))
    assert load_published("kerple-3").matches(setting)
    assert load_published("kerple-3").matches(replace(setting, protocol="kerple@320"))
    for difference in (
        {"protocol": "kerple@8"},
        {"train_length": 256},
        {"model": (24, 1024)},
        {"model": None},
    ):
        assert not load_published("kerple-3").matches(replace(setting, **difference))
    assert load_published("dape").matches(replace(setting, protocol="last-k@256"))
    assert not load_published("dape").matches(replace(setting, protocol="last-k@128"))


def test_names():
    three = load_published("kerple-3")
    assert three.name(Method("kerple_log")) == "KERPLE (log)"
    assert three.name(Method("kerple_log", "window@512")) == "KERPLE (log), window@512"
    assert three.name(Method("dape_kerple (variant Concat)")) == "DAPE-Kerple (variant Concat)"
    assert three.name(Method("a_new_method")) == "a_new_method"
    assert load_published("lex").name(Method("xpos", "blockwise")) == "LEX"
    assert load_published("dape").name(Method("kerple_log", "window")) == "Kerple, window"
    assert display_name(Method("kerple_log", "window")) == "KERPLE (log), window"
    assert display_name(Method("learned")) == "learned"
    assert corpus_name("GITHUB") == "GitHub"
    assert corpus_name("books") == "books"
    assert corpus_name(None) == "text"
    assert (
        corpus_sort_key("openwebtext2")
        < corpus_sort_key("ArXiv")
        < corpus_sort_key("books")
        == corpus_sort_key(None)
    )


def test_methods_have_the_same_style_in_all_figures():
    first = line_numbers({"KERPLE (log)": "kerple_log", "ALiBi": "alibi", "mine": "mine"})
    other = line_numbers(
        {"ALiBi": "alibi", "ALiBi, window": "alibi"}, ["mine", "alibi", "kerple_log"]
    )
    assert first["ALiBi"] == other["ALiBi"] == 2
    assert (first["KERPLE (log)"], first["mine"]) == (0, 1)
    assert other["ALiBi, window"] == 3, "1 is that of another method of the report"
