"""Markdown and LaTeX output of tables."""

import pytest

from megatron.reporting.tables import Cell, Row, Section, Table, escape_markdown, latex, markdown

TABLE = Table(
    "name",
    "A_title",
    ("Length",),
    ("KERPLE (log)", "b_c"),
    (
        Section("GitHub"),
        Row(("512",), (Cell("3.40 ± 0.20", best=True), Cell("3,900 ± 10", worse=True))),
        Row(("512, paper",), (Cell("3.40 ± 0.20"), Cell("")), published=True),
    ),
    ("5 % of it.",),
)


def test_markdown():
    assert markdown(TABLE).splitlines() == [
        "## A_title",
        "",
        "| Length | KERPLE (log) | b_c |",
        "| :-- | --: | --: |",
        "| **GitHub** |  |  |",
        "| 512 | **3.40 ± 0.20** | 3,900 ± 10 † |",
        "| *512, paper* | *3.40 ± 0.20* |  |",
        "",
        "- 5 % of it.",
    ]


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("kerple_log", "kerple_log"),
        ("kerple_power_ap_", "kerple_power_ap_"),
        ("_a_ 512*", r"\_a_ 512\*"),
        ("a | b", r"a \| b"),
        ("p < 0.05", "p < 0.05"),
        ("<script>", r"\<script>"),
    ],
)
def test_escaped_markdown(text, escaped):
    assert escape_markdown(text) == escaped


def test_latex():
    assert latex(TABLE).splitlines() == [
        r"\begin{table}",
        r"\centering\footnotesize",
        r"\setlength{\tabcolsep}{3pt}",
        r"\caption{\textbf{A\_title.} 5 \% of it.}",
        r"\label{tab:name}",
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"Length & KERPLE (log) & b\_c \\",
        r"\midrule",
        r"\multicolumn{3}{l}{\textit{GitHub}} \\",
        r"512 & \textbf{3.40}{\tiny$\pm$0.20} & 3,900{\tiny$\pm$10}$^\dagger$ \\",
        r"{\itshape 512, paper} & {\itshape 3.40{\tiny$\pm$0.20}} &  \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]


def test_names_are_never_commands():
    lines = (
        Section("*a"),
        Row((r"\input{/etc/passwd}",), (Cell("-1"),)),
        Row(('[=cmd|"c"!A1',), (Cell("2"),)),
    )
    table = Table("n", "$x^2$ & 5 %", ("@a",), ("=b",), lines)
    text = latex(table)
    assert r"\caption{\textbf{\$x\textasciicircum{}2\$ \& 5 \%.}}" in text
    assert r"\multicolumn{2}{l}{\textit{{*}a}} \\" in text
    assert r"\textbackslash{}input\{/etc/passwd\} & $-$1 \\" in text
    assert '{[}=cmd$|$"c"!A1 & 2' in text
