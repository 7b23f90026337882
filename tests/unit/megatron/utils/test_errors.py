import pytest
from pydantic import BaseModel, ValidationError, field_validator

from megatron.utils.errors import first_line, first_problem, visible


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("wrong\nat byte 3"), "wrong"),
        (ValueError("\n  wrong"), "wrong"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_first_line(error, line):
    assert first_line(error) == line


def test_visible_escapes_what_a_terminal_would_interpret():
    assert visible("größe 1\t2\n") == "größe 1\t2\n"
    assert visible("a\x1b[31mb\r\ud800\u202e") == "a\\x1b[31mb\\r\\ud800\\u202e"


class Named(BaseModel):
    name: str

    @field_validator("name")
    @classmethod
    def reject(cls, name: str) -> str:
        raise ValueError(f"{name} is taken")


def test_first_problem_is_the_validator_s_own_message():
    with pytest.raises(ValidationError) as caught:
        Named(name="a")
    assert first_problem(caught.value) == "name: a is taken"
