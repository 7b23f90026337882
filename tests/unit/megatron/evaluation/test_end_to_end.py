"""Trained, evaluated and sampled as a user does it, through deepy.py."""

import json

from tests.support.checkpoints import write_corpus
from tests.support.runs import run, training_settings


def test_train_evaluate_generate(tmp_path):
    settings = training_settings(tmp_path, write_corpus(tmp_path))
    run(tmp_path, settings)

    keys = {"evaluation_lengths": [32, 128, 512], "num_gpus": 2}
    output = run(tmp_path, {**settings, **keys}, "--output", str(tmp_path / "report"), script="evaluate.py")
    rows = json.loads((tmp_path / "report" / "extrapolation.json").read_text())["rows"]
    assert [(row["pos_emb"], row["seed"], row["length"]) for row in rows] == [
        ("kerple_log", 77, 32),
        ("kerple_log", 77, 128),
        ("kerple_log", 77, 512),
    ]
    assert len({row["tokens"] for row in rows}) == 1
    assert all(1 < row["perplexity"] < 1000 for row in rows)
    assert output.count("loaded ") == 1  # of two processes one works
    assert "global_step6" in output

    (tmp_path / "prompts.txt").write_text("def \nclass ")
    samples = tmp_path / "samples.jsonl"
    words = ["-i", str(tmp_path / "prompts.txt"), "-o", str(samples)]
    run(tmp_path, {**settings, "maximum_tokens": 40, "temperature": 1.0}, *words, script="generate.py")
    records = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [record["context"] for record in records] == ["def ", "class "]
    assert all(record["finished"] or record["length"] == 40 for record in records)
