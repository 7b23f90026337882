"""evaluate.py with other options of a positional method: the same weights, other positions."""

import pytest
import torch

from megatron.cli.evaluate import main
from megatron.evaluation.records import extrapolation_records, read_results
from megatron.utils.errors import UserError
from tests.support.checkpoints import (
    TRAIN_LENGTH,
    VOCABULARY,
    settings_of,
    write_checkpoint,
    write_yaml,
)
from tests.support.corpora import part_tokens
from tests.support.language_models import direct_losses, small_gpt

LENGTH = 4 * TRAIN_LENGTH
LINEAR = {"scaling": "linear", "factor": 4}


@pytest.fixture(scope="module")
def rotary(tmp_path_factory, data_path):
    folder = tmp_path_factory.mktemp("rotary")
    return folder, write_checkpoint(folder, "rotary", data_path)


def rows_in(folder):
    return extrapolation_records(read_results(folder))


def loss_with(model, data_path, **options) -> float:
    """From one call, with these options and the same weights."""
    other = small_gpt(
        "rotary", max_positions=TRAIN_LENGTH, padded_vocab_size=VOCABULARY, pos_emb_options=options
    )
    other.load_state_dict(model.state_dict())
    text = torch.from_numpy(part_tokens(data_path, "2,1,0"))[None, : LENGTH + 1]
    with torch.no_grad():
        return direct_losses(other(text[:, :-1]), text[:, 1:]).mean().item()


@pytest.mark.parametrize(
    "options",
    [
        LINEAR,
        {"scaling": "dynamic", "factor": 4},
        {"random_range": 256, "random_length": LENGTH},
    ],
    ids=lambda options: options.get("scaling", "random"),
)
def test_position_scaling_with_set(options, rotary, data_path, tmp_path):
    folder, model = rotary
    words = [f"pos-emb-options.{name}={value}" for name, value in options.items()]
    length = ["--lengths", str(LENGTH), "--tokens", str(LENGTH), "--query-chunk", "24"]
    main(["--checkpoint", str(folder), *length, "--output", str(tmp_path), "--set", *words])
    (row,) = rows_in(tmp_path)
    assert row["loss"] == pytest.approx(loss_with(model, data_path, **options), abs=1e-5)
    assert abs(row["loss"] - loss_with(model, data_path)) > 1e-4
    assert (
        row["pos_emb"]
        == f"rotary ({', '.join(f'{name} {value}' for name, value in options.items())})"
    )


def test_position_scaling_in_the_configuration(rotary, data_path, tmp_path, capsys):
    folder, model = rotary
    keys = {"load": str(folder), "pos_emb_options": LINEAR}
    path = str(write_yaml(tmp_path / "all.yml", {**settings_of("rotary", data_path), **keys}))
    words = [
        "--lengths",
        str(LENGTH),
        "--tokens",
        str(LENGTH),
        "--output",
        str(tmp_path / "report"),
    ]
    main([path, *words])
    assert rows_in(tmp_path / "report")[0]["loss"] == pytest.approx(
        loss_with(model, data_path, **LINEAR), abs=1e-5
    )
    assert "rotary (scaling linear, factor 4)" in capsys.readouterr().err


def test_a_random_range_that_is_too_short_has_a_note(rotary, tmp_path):
    words = ["--lengths", str(LENGTH), "--tokens", str(LENGTH), "--output", str(tmp_path), "--set"]
    main(["--checkpoint", str(rotary[0]), *words, "pos-emb-options={random_range: 64}"])
    (row,) = rows_in(tmp_path)
    assert row["loss"] is None
    assert "random_range 64" in row["note"]


@pytest.mark.parametrize(
    ("pos_emb", "words", "message"),
    [
        ("alibi", ["pos-emb-options.scaling=linear"], "Alibi.*'scaling'"),
        ("rotary", ["pos-emb-options.fraction=0.5"], "fraction.*pos_emb rotary"),
        ("rotary", ["pos-emb-options.scaling=cubic"], "scaling 'cubic'"),
        ("kerple", ["pos-emb-options.bias=log"], "pos_emb kerple"),
    ],
)
def test_options_that_change_the_weights_are_rejected(pos_emb, words, message, data_path, tmp_path):
    write_checkpoint(tmp_path / "run", pos_emb, data_path)
    with pytest.raises(UserError, match=message):
        main(
            [
                "--checkpoint",
                str(tmp_path / "run"),
                "--lengths",
                "64",
                "--output",
                str(tmp_path),
                "--set",
                *words,
            ]
        )
