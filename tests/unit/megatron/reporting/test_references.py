"""BibTeX entries of positional methods."""

import pytest

from kerple.positional.registry import primary_names
from megatron.reporting.references import arxiv_number, bibtex, papers


@pytest.mark.parametrize(
    ("pos_emb", "number"),
    [
        ("kerple_log (factor 1)", "2205.09921"),
        ("rpe", "1910.10683"),
        ("rotary", "2104.09864"),
        ("forgetting", "2503.02130"),
        ("cable", "2503.08067"),
        ("learned", None),
        ("unknown", None),
    ],
)
def test_numbers_are_those_of_the_docstrings(pos_emb, number):
    assert arxiv_number(pos_emb) == number


def test_every_paper_has_an_entry():
    assert {number for name in primary_names() if (number := arxiv_number(name))} == papers().keys()


def test_bibtex():
    text = bibtex(["kerple_log", "kerple_power_ap_", "alibi", "mine"])
    assert text.count("@misc{") == 2
    assert text.startswith("@misc{chi2022_2205_09921,\n  author = {Chi, Ta-Chung and Fan, Ting-Han and ")
    assert "  title = {{KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation}}," in text
    assert text.count("{") == text.count("}")
