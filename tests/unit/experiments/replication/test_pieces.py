"""Cutting C into short documents."""

from experiments.replication.pieces import cut_at_blank_lines


def test_a_text_is_cut_at_blank_lines():
    text = "\n#include <a.h>\n\n\nint a;\n \t\nint f(void)\n{\n\treturn a;\n}\n"
    assert cut_at_blank_lines(text) == [
        "#include <a.h>",
        "int a;",
        "int f(void)\n{\n\treturn a;\n}",
    ]
