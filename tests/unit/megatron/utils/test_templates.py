"""Templates: escaping and missing values."""

import pytest
from jinja2 import UndefinedError

from megatron.utils.templates import templates


def test_escaping_and_missing_values():
    environment = templates("megatron.cli")
    assert environment.autoescape("page.html.j2")
    assert not environment.autoescape("init.yml.j2")
    with pytest.raises(UndefinedError, match="undefined"):
        environment.get_template("init.yml.j2").render()
