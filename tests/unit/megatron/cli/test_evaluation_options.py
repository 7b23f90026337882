"""Options of evaluate.py: those that a sweep checks before any run is trained, and
inference modes.
"""

import pytest

from megatron.cli.evaluate import main
from megatron.cli.evaluation_options import check_run
from megatron.config import Config
from megatron.evaluation.records import read_results
from megatron.utils.errors import UserError
from tests.support.checkpoints import write_checkpoint, write_corpus
from tests.support.errors import assert_rejected


def test_options_are_checked_without_a_checkpoint(tmp_path):
    data = write_corpus(tmp_path)
    keys = {"seq-length": 32, "max-position-embeddings": 32}
    keys = {**keys, "num-layers": 1, "hidden-size": 8, "num-attention-heads": 2}
    config = Config.from_flat({**keys, "data-path": str(data), "split": "1,1,0"})
    good = [
        "--lengths",
        "32",
        "--modes",
        "window@8",
        "--protocol",
        "last-k@16",
        "--precision",
        "bf16",
    ]
    check_run(good, config, "sweep.yml", has_data=True)
    too_long = ["--lengths", str(1 << 30), "3", "--protocol", "last-k@1", "sliding@1", "kerple"]
    check_run(too_long, config, "sweep.yml", has_data=False)
    for words, message in (
        (["--lengths", "x"], "sweep.yml: argument --lengths: must be an integer from 1"),
        (
            ["--passkey", "--passkey-depths", "0.5", "2"],
            "--passkey-depths: must be a number from 0 to 1, not '2'",
        ),
        (["--modes", "sliding"], "'sliding' is unknown"),
        (
            ["--lengths", str(1 << 30)],
            r"text_document, valid part of split .* \([\d,]+ tokens\): .* too short",
        ),
        (
            ["--lengths", "32", "--modes", "sinks@4+12", "--resolution"],
            "--resolution: not measured in inference mode",
        ),
        (["--lengths", "32", "--resolution", "100000"], "--resolution 100000: the text has only"),
        (["--lengths", "32", "--passkey"], "tokenizer-type GPT2BPETokenizer needs vocab-file"),
    ):
        assert_rejected(message, check_run, words, config, "sweep.yml", has_data=True)


@pytest.mark.ci
def test_methods_and_modes(tmp_path, capsys):
    """A mode that a method does not support is n/a, with the reason; one that no method supports is
    an error.
    """
    data = write_corpus(tmp_path)
    models = {
        method: write_checkpoint(tmp_path / method, method, data)
        for method in ("kerple_log", "learned")
    }
    folders = [str(tmp_path / method) for method in models]
    output = tmp_path / "report"
    words = ["--checkpoint", *folders, "--lengths", "32", "64", "--output", str(output)]
    main([*words, "--modes", "full", "sinks@4+12+reindexed+logn", "full+clip@16"])
    rows = {(row["pos_emb"], row["mode"], row["length"]): row for row in read_results(output)}
    assert rows["learned", "full+clip@16", 32]["loss"] is None
    assert "distance map clip has no meaning" in rows["learned", "full+clip@16", 32]["note"]
    printed = capsys.readouterr().out
    assert "learned: inference mode full+clip@16 is not supported: pos_emb learned" in printed
    losses = {mode: rows["kerple_log", mode, 64]["loss"] for _, mode, _ in rows}
    assert len(set(losses.values())) == 3
    with pytest.raises(
        UserError, match=r"inference mode full\+dynamic-ntk is not supported: pos_emb kerple_log"
    ):
        main([*words, "--modes", "full", "full+dynamic-ntk"])
    main(["--skip-unsupported", *words, "--modes", "full", "full+dynamic-ntk"])
    notes = {
        row["pos_emb"]: row["note"]
        for row in read_results(output)
        if row["mode"] == "full+dynamic-ntk"
    }
    assert all("is not supported: pos_emb " + method in notes[method] for method in models)
