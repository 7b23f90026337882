"""Options of a positional method that are chosen at evaluation: the same weights, other positions."""

import json
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.configuration import model_differences
from megatron.cli.evaluate import main
from megatron.config import Config
from megatron.data.streams import validation_stream
from megatron.utils.errors import UserError
from tests.support.checkpoints import TRAIN_LENGTH, VOCABULARY, settings_of, write_checkpoint, write_corpus, write_yaml
from tests.support.language_models import direct_losses, small_gpt

LENGTH = 4 * TRAIN_LENGTH
LINEAR = {"scaling": "linear", "factor": 4}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def rotary(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("rotary")
    return folder, write_checkpoint(folder, "rotary", data)


def loss_with(model, data, **options) -> float:
    """By one call over the text, of a model with these options and the same weights."""
    other = small_gpt(
        "rotary", max_positions=TRAIN_LENGTH, padded_vocab_size=VOCABULARY, pos_emb_options=tuple(options.items())
    )
    other.load_state_dict(model.state_dict())
    text = torch.from_numpy(validation_stream(data, "2,1,0"))[None, : LENGTH + 1]
    with torch.no_grad():
        return direct_losses(other(text[:, :-1]), text[:, 1:]).mean().item()


def row_in(folder) -> dict:
    (row,) = json.loads((Path(folder) / "extrapolation.json").read_text())["rows"]
    return row


@pytest.mark.parametrize(
    "options",
    [
        LINEAR,
        {"scaling": "ntk", "factor": 4},
        {"scaling": "yarn", "factor": 4},
        {"scaling": "random", "random_range": 256, "random_length": LENGTH},
    ],
    ids=lambda options: options["scaling"],
)
def test_scalings_with_set(options, rotary, data, tmp_path):
    folder, model = rotary
    words = [f"pos-emb-options.{name}={value}" for name, value in options.items()]
    length = ["--lengths", str(LENGTH), "--tokens", str(LENGTH), "--query-chunk", "24"]
    main(["--checkpoint", str(folder), *length, "--output", str(tmp_path), "--set", *words])
    row = row_in(tmp_path)
    assert row["loss"] == pytest.approx(loss_with(model, data, **options), abs=1e-5)
    assert abs(row["loss"] - loss_with(model, data)) > 1e-4
    assert row["pos_emb"] == f"rotary ({', '.join(f'{name} {value}' for name, value in options.items())})"


def test_from_a_configuration_file(rotary, data, tmp_path, capsys):
    folder, model = rotary
    keys = {"load": str(folder), "pos_emb_options": LINEAR}
    path = str(write_yaml(tmp_path / "all.yml", {**settings_of("rotary", data), **keys}))
    words = ["--lengths", str(LENGTH), "--tokens", str(LENGTH), "--output", str(tmp_path / "report")]
    main([path, *words])
    assert row_in(tmp_path / "report")["loss"] == pytest.approx(loss_with(model, data, **LINEAR), abs=1e-5)
    assert "rotary (scaling linear, factor 4)" in capsys.readouterr().err


def test_a_draw_that_is_too_short_is_no_number(rotary, tmp_path):
    words = ["--lengths", str(LENGTH), "--tokens", str(LENGTH), "--output", str(tmp_path), "--set"]
    main(["--checkpoint", str(rotary[0]), *words, "pos-emb-options={scaling: random, random_range: 64}"])
    row = row_in(tmp_path)
    assert row["loss"] is None
    assert f"random_length {TRAIN_LENGTH}" in row["note"]


def test_a_run_goes_on_with_the_options_it_began_with():
    """What evaluation may choose may not change between the steps of one run; a default that is named is no change."""

    def configured(pos_emb, **options):
        return Config.from_flat(settings_of(pos_emb, "nowhere", pos_emb_options=options))

    plain, linear = configured("rotary"), configured("rotary", **LINEAR)
    (phrase,) = model_differences(plain, linear)
    assert "the options of pos_emb" in phrase
    assert model_differences(plain, linear, evaluation=True) == []
    assert model_differences(configured("kerple_log"), configured("kerple_log", parameters="shared")) == []
    assert model_differences(
        configured("kerple_log"), configured("kerple_log", parameters="per-layer"), evaluation=True
    )


@pytest.mark.parametrize(
    ("pos_emb", "words", "message"),
    [
        ("alibi", ["pos-emb-options.scaling=linear"], "Alibi has no option 'scaling'"),
        (
            "rotary",
            ["pos-emb-options.fraction=0.5"],
            "only scaling, .* can be chosen at evaluation, not fraction",
        ),
        ("rotary", ["pos-emb-options.scaling=cubic"], "scaling 'cubic' is unknown"),
        ("kerple", ["pos-emb-options.bias=log"], "pos_emb kerple, of which only nothing can be chosen at evaluation"),
    ],
)
def test_what_changes_the_weights_is_refused(pos_emb, words, message, data, tmp_path):
    write_checkpoint(tmp_path / "run", pos_emb, data)
    with pytest.raises(UserError, match=message):
        main(["--checkpoint", str(tmp_path / "run"), "--lengths", "64", "--output", str(tmp_path), "--set", *words])
