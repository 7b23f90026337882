"""Wrong training configurations, drawn by hypothesis: values, keys, damaged YAML and --set options.

Each must load or end in one UserError; one that loads must train or be rejected by name.
"""

import contextlib
import json
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st

from megatron.config.checks import KNOWN_KEYS
from megatron.config.schema import FIELDS, SECTIONS
from megatron.config.schema.base import WILDCARD
from tests.soak import changes
from tests.soak.cases import Case, Draw, pick
from tests.support.checkpoints import write_corpus
from tests.support.hostile import WRONG_VALUES
from tests.support.runs import training_settings

# Without other folders, in which a configuration would be right to write.
VALUES: tuple[Any, ...] = (
    *(value for value in WRONG_VALUES if not re.search(r"\.\.|/tmp", str(value))),
    *(
        False,
        2,
        3,
        7,
        16,
        33,
        1000,
        2**16,
        2**32,
        -(2**63),
        2**64,
        1.0,
        -0.5,
        1e-300,
        1e30,
        1e38,
        "x/" * 3000,
        "$HOME",
    ),
    *(
        "~",
        "{seed}",
        "{",
        "}{",
        "{save}",
        "%s",
        "-1",
        "1e5",
        "true",
        "null",
        "runs/é\n\t",
        {"": 1},
        {"device": "cpu"},
    ),
)
# Type -> values that a field of this type often accepts.
PLAIN: dict[type, tuple[Any, ...]] = {
    bool: (True, False),
    int: (0, 1, 2, 3, 4, 5, 8, 10, 16, 32, 64, 100, 1000, 10**5, 10**9),
    float: (0, 0.001, 0.1, 0.5, 0.9, 1, 1.0, 2.0, 8.0, 100.0, 1e6, 1e20),
    str: (
        "a",
        "runs/a",
        "none",
        "kerple_log",
        "rotary",
        "type:gpt",
        "uniform",
        "8,1,1",
        "1",
        "cpu",
    ),
}

paths = st.sampled_from(list(FIELDS))
texts = st.text(st.characters(exclude_characters="/"), max_size=20).filter(
    lambda text: ".." not in text
)
values = st.one_of(
    *[st.sampled_from(VALUES)] * 3,
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    texts,
)


class Config(NamedTuple):
    """The content of a wrong configuration file, and `key=value` words for --set."""

    content: bytes
    overrides: tuple[str, ...] = ()


def with_values(base: Mapping[str, Any], values: Mapping[tuple[str, ...], Any]) -> Config:
    """The keys `base` with other values; paths are those of `FIELDS`."""
    settings = json.loads(json.dumps(base))
    for (*parents, last), value in values.items():
        parent = settings
        with contextlib.suppress(AttributeError, TypeError):  # a parent has a wrong value
            for name in parents:
                parent = parent.setdefault(name, {})
            parent["apex" if last == WILDCARD else last] = value
    return Config(json.dumps(settings).encode())


for kind, plain in PLAIN.items():
    st.register_type_strategy(kind, st.sampled_from(plain))


def of_type(annotation: Any) -> st.SearchStrategy[Any]:
    """Values that a field with this annotation often accepts."""
    if typing.get_origin(annotation) is dict:  # its values may have any type
        anything = st.sampled_from((None, True, 0, 1, "a", "cpu", 1e9, 0.5, {}, {"device": "cpu"}))
        return st.dictionaries(st.from_type(typing.get_args(annotation)[0]), anything, max_size=2)
    return st.from_type(annotation)


@st.composite
def configs(draw: Draw, base: Mapping[str, Any]) -> Config:
    """A wrong variant of the keys `base`, a valid configuration. A third combines values that the
    schema accepts.
    """
    how, content = (
        pick(draw, ("plausible",) * 3 + ("values",) * 2 + ("override", "damage", "key")),
        json.dumps(base),
    )
    if how == "plausible":
        chosen = {}
        for path in draw(st.lists(paths, min_size=1, max_size=4)):
            section, name = FIELDS[path]
            chosen[path] = draw(of_type(SECTIONS[section].model_fields[name].annotation))
        return with_values(base, chosen)
    if how == "values":
        return with_values(base, draw(st.dictionaries(paths, values, min_size=1, max_size=2)))
    if how == "damage":
        return Config(changes.damage(draw, content.encode()))
    if how == "override":
        path = ".".join(draw(paths))
        name = pick(draw, [path] * 10 + ["", ".", f"{path}.x", path.upper()])
        return Config(content.encode(), (f"{name}={json.dumps(draw(values))}",))
    # An unknown, unsupported, misspelled or repeated key.
    misspelled = paths.map(lambda path: path[0][1:]) | paths.map(
        lambda path: path[0].replace("_", "-")
    )
    key = draw(st.sampled_from(sorted(KNOWN_KEYS)) | misspelled | texts)
    return Config(f"{content[:-1]}, {json.dumps(key)}: {json.dumps(draw(values))}}}".encode())


def wrong_config(draw: Draw, folder: Path) -> Case:
    """A configuration of a run of two iterations, for train.py."""
    settings = training_settings(
        folder, write_corpus(folder, documents=80), train_iters=2, save_interval=1
    )
    config = draw(configs(settings))
    (folder / "config.yml").write_bytes(config.content)
    overrides = ["--set", *config.overrides] if config.overrides else []
    return Case(
        ["train.py", "config.yml", *overrides],
        stop_at=b"iteration 1/",
        accepted_at=b" on cpu: data parallel ",
    )
