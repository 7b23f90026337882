"""The pages in docs/results, from small records."""

import json

import pytest

from experiments.replication import pages as replication
from experiments.replication.pages import END, START, add_results, few_seeds, figures, main_table, texts, write_pages
from megatron.evaluation.records import read_results
from megatron.utils.errors import UserError
from tests.support.records import record

ENVIRONMENT = {"commit": "ab12", "machine": "EPYC, 2 cores", "versions": "Python 3.11, torch 2.13"}
TOKENS = [60, 40]


def sweep_records(corpus, methods, seeds=(1, 2)):
    """Losses, losses by position and effective lengths, with the keys that evaluate.py writes."""
    result = []
    for number, pos_emb in enumerate(methods):
        for seed in seeds:
            for length, mode in ((128, "full"), (1024, "full"), (8192, "full"), (1024, "window@128")):
                loss = 2.0 + 0.1 * number + 0.01 * seed * (1 + number) + length / 1e5 + 0.123456789
                loss += 0.5 * (mode != "full")
                keys = {"segments": 4, "documents": 2, "stderr": 0.1, "bits_per_byte": 1.5, "loss": loss}
                keys |= {"targets": "ab", "groups": {"tokens": TOKENS, "losses": [loss - 0.04 * seed, loss + 0.06]}}
                keys |= {"corpus": corpus, "train_length": 128, "mode": mode, "measurement": "cd"}
                entry = {**record(pos_emb, length, 8.0 + number, seed, **keys), "environment": ENVIRONMENT}
                entry["checkpoint"] |= {
                    "path": f"/home/user/{seed}/{pos_emb}/checkpoints",
                    "fingerprint": f"{pos_emb}{seed}{corpus}",
                }
                positions = {"edges": [0, 128, length], "losses": [3.123456789, loss], "counts": [9, 9]}
                result += [entry] if length == 128 else [entry, {**entry, "kind": "positions", **positions}]
            heads = {"layers": ["all layers"], "effective_lengths": [[4 + seed, 20480]], "length": 20480}
            result.append({**entry, "kind": "effective_length", "mode": "full", **heads})
    return result


def write(folder, records):
    folder.mkdir(parents=True)
    (folder / "results.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in records))
    return folder


@pytest.fixture
def pages(tmp_path):
    """docs/results with the records of two sweeps and of a pilot, in a project with a README."""
    folder = tmp_path / "docs" / "results"
    add_results(
        write(tmp_path / "runs" / "c", sweep_records("debian_c", ("kerple_log", "alibi", "xpos"))), folder / "records"
    )
    prose = write(tmp_path / "runs" / "prose" / "runs" / "1", sweep_records("debian_prose", ("kerple_log", "alibi")))
    add_results(prose.parents[1], folder / "records")
    pilot = sweep_records("debian_c", ("kerple_log (log)", "alibi (alibi)", "kerple_log (log-factor10)"), seeds=(1,))
    add_results(write(tmp_path / "runs" / "pilot", pilot), folder / "records")
    long = sweep_records("debian_c", ("kerple_log",), seeds=(1,))
    for entry in long:
        entry["train_length"] = 1024
    add_results(write(tmp_path / "runs" / "pilot-1024", long), folder / "records")
    more = [entry for entry in sweep_records("debian_c", ("kerple_log", "alibi")) if entry["length"] == 128]
    more = [{**entry, "loss": 7.0, "tokens": 5000, "stderr": 0.01} for entry in more]
    add_results(write(tmp_path / "runs" / "training-length", more), folder / "records")
    (tmp_path / "README.md").write_text(f"before\n{START}\nan earlier block\n{END}\nafter\n")
    return folder


def test_records_are_compact_and_complete(pages):
    records = read_results(pages / "records" / "c")
    assert len(records) == 3 * 2 * (4 + 3 + 1)
    first = next(entry for entry in records if entry["length"] == 1024)
    assert first["groups"]["losses"] == [2.1037, 2.2037]
    assert first["loss"] == 2.0 + 0.01 + 0.01024 + 0.123456789
    assert not first["checkpoint"]["path"].startswith("/")
    assert next(entry for entry in records if entry["kind"] == "positions")["losses"][0] == 3.1235
    written = sorted(path.parent.name for path in (pages / "records" / "prose").glob("*/results.jsonl"))
    assert written == ["1", "2"]  # a file for each seed


def test_files_are_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(replication, "MAX_BYTES", 1000)
    folder = write(tmp_path / "c", sweep_records("debian_c", ("kerple_log",)))
    with pytest.raises(UserError, match=r"c/1/results\.jsonl: [0-9,]+ bytes are more than 1,000"):
        add_results(folder, tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_the_pages(pages, tmp_path):
    contents = {path.relative_to(tmp_path).as_posix(): text for path, text in texts(pages, pages / "records").items()}
    assert list(contents) == [
        "docs/results/README.md",
        "docs/results/tables.md",
        "docs/results/pilot.md",
        "docs/results/modes.md",
        "README.md",
    ]
    claims = contents["docs/results/README.md"]
    log_and_alibi = "Log has a lower loss than ALiBi at the training length | Table 3 (GitHub 3.40 and 3.42)"
    assert f"| {log_and_alibi} | **holds** | loss -0." in claims
    assert "Of 60 claims of the papers, 1 holds, " in claims
    assert "- C, 6 runs: KERPLE (log) 2, ALiBi 2, xPos 2\n- Prose, 4 runs: KERPLE (log) 2, ALiBi 2\n" in claims
    assert "- Measured with commit ab12, EPYC, 2 cores, Python 3.11, torch 2.13." in claims
    assert "| C | 2 | 12 layers of 768 | 128 | 10 | 8,192 | 1,000 (2) | 0.100 |" in claims
    assert "losses on more tokens: 5,000 of C (2 documents, largest standard error of log's loss 0.010).\n" in claims
    readme = contents["README.md"]
    assert readme.startswith(f"before\n{START}\n![Perplexity by length]")
    assert readme.endswith(f"{END}\nafter\n")
    assert "an earlier block" not in readme
    assert "on C source code of the Linux kernel (in place of GitHub), English prose" in readme
    assert "docs/results/README.md" in readme
    tables = contents["docs/results/tables.md"]
    assert "**C, window@128**" in tables
    assert "| ALiBi | 7.000 | 0.010 |" in tables
    assert tables.count("7.000") == 2  # in no other table
    modes = tables.partition("minus that with all keys")[2]
    assert "| method | window@128, 1024 |" in modes
    assert modes.count("| ALiBi | +0.5") == 2
    prose = tables.partition("**Prose, full**")[2].partition("**Prose, window@128**")[0]
    assert "xPos" not in prose
    pilot = contents["docs/results/pilot.md"]
    rows = [line.strip("| ").split(" | ") for line in pilot.splitlines() if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == ["kerple_log (log)", "alibi (alibi)", "kerple_log (log-factor10)", "kerple_log"]
    assert [row[2] for row in rows] == ["128", "128", "128", "1024"]
    assert rows[2][5].startswith("+0.2")
    assert rows[3][6].startswith("2.1")  # at length 128


def test_the_main_table_has_all_lengths_or_three_of_each_corpus(pages):
    records = [*read_results(pages / "records" / "c"), *read_results(pages / "records" / "prose")]
    table = main_table(records)
    assert table.columns == tuple(f"{corpus}, {n}" for corpus in ("C", "Prose") for n in ("128", "1,024", "8,192"))
    assert [row.labels[0] for row in table.rows] == ["KERPLE (log)", "ALiBi"]
    one = [entry for entry in records if entry["corpus"] == "debian_c"]
    one += [{**entry, "length": 256} for entry in one if entry["length"] == 128]
    assert main_table(one).columns == ("128", "256", "1,024", "8,192")
    assert main_table([]) is None


def test_methods_with_fewer_seeds_are_named_and_not_compared(pages):
    records = [*read_results(pages / "records" / "c"), *read_results(pages / "records" / "prose")]
    assert few_seeds(records) == ""
    fewer = [
        entry for entry in records if (entry["seed"], entry["pos_emb"], entry["corpus"][7:]) != (2, "kerple_log", "c")
    ]
    assert len(fewer) < len(records)
    assert few_seeds(fewer).startswith(" KERPLE (log) on C has only seed 1: ")
    log = main_table(fewer).rows[0]
    assert [cell.best for cell in log.cells] == [False] * 3 + [True] * 3


def test_a_run_without_a_value_at_one_length_is_named(pages):
    records = [dict(entry) for entry in read_results(pages / "records" / "c")]
    for entry in records:
        if (entry["pos_emb"], entry["seed"], entry["length"], entry["kind"]) == ("alibi", 2, 8192, "extrapolation"):
            entry |= {"loss": None, "perplexity": None}
    assert few_seeds(records).startswith(" ALiBi on C has only seed 1: ")
    assert main_table(records).notes == ("n/a: ALiBi at 8,192: the value overflows a float.",)


def test_rows_of_modes_with_fewer_seeds_are_labeled(pages):
    records = list(read_results(pages / "records" / "c"))
    fewer = [entry for entry in records if (entry["pos_emb"], entry["seed"]) != ("alibi", 2)]
    for selected, name in ((records, "ALiBi"), (fewer, "ALiBi (1 seed)")):
        (table,) = replication.mode_table(selected)
        assert [row.labels[0] for row in table.rows] == ["KERPLE (log)", name, "xPos"]


def test_seeds_are_compared_as_sets(pages):
    records = list(read_results(pages / "records" / "c"))
    assert few_seeds(sorted(records, key=lambda entry: (entry["pos_emb"] == "alibi") * -entry["seed"])) == ""
    other = [{**entry, "seed": 3} if (entry["pos_emb"], entry["seed"]) == ("alibi", 2) else entry for entry in records]
    assert few_seeds(other).startswith(" ALiBi on C has only seeds 1, 3: ")


def test_sentences_follow_the_records(pages):
    text = texts(pages, pages / "records")[pages / "README.md"]
    assert "Some methods have fewer seeds" not in text
    assert "of the other methods and of log, on C; bands" in text
    assert "Planned: 3 seeds of every method" in text
    xpos = [entry for entry in sweep_records("debian_prose", ("xpos",)) if entry["seed"] == 1]
    log = sweep_records("debian_c", ("kerple_log",), seeds=(3,))
    for name, records in (("prose-xpos", xpos), ("c-log", log)):
        add_results(write(pages.parents[1] / "runs" / name, records), pages / "records")
    text = texts(pages, pages / "records")[pages / "README.md"]
    assert "Some methods have fewer seeds (see above)." in text
    assert "of the other methods and of log, on C and Prose; bands" in text


def test_figures(pages):
    assert sorted(path.stem for path in figures(pages, pages / "records")) == [
        "effective-lengths-debian_c",
        "effective-lengths-debian_prose",
        "main",
        "other-methods",
        "perplexity",
        "positions-1024",
    ]


def test_without_results_nothing_is_measured(tmp_path):
    folder = tmp_path / "docs" / "results"
    folder.mkdir(parents=True)
    written = write_pages(folder, folder / "records")
    assert [path.name for path in written] == ["README.md", "tables.md", "pilot.md", "modes.md"]
    text = (folder / "README.md").read_text()
    assert "No results yet." in text
    assert "No claim of the papers has been measured yet." in text
    assert "Not measured." in (folder / "pilot.md").read_text()
    assert "Not measured." in (folder / "modes.md").read_text()


def test_the_page_of_inference_modes(pages, tmp_path):
    claims = texts(pages, pages / "records")[pages / "README.md"]
    records = sweep_records("debian_c", ("kerple_log", "alibi"), seeds=(1,))
    add_results(write(tmp_path / "runs" / "modes", records), pages / "records")
    contents = texts(pages, pages / "records")
    assert contents[pages / "README.md"] == claims
    page = contents[pages / "modes.md"]
    assert "| ALiBi | window@128 | – | +0.5000 ± 0.0000 | – |" in page
    (figure,) = [path for path in figures(pages, pages / "records") if path.name.startswith("modes")]
    assert figure.name in page


def test_step_times(pages):
    rows = [
        {"name": name, "median": 0.1, "ratio": 1.0, "seconds": [time, time + 0.01, time]}
        for name, time in (("plain PyTorch", 0.2), ("kerple_log", 0.10), ("rpe", 0.12), ("alibi", 0.11))
    ]
    content = {"hardware": {"processor": "EPYC"}, "tables": {"training step": rows}}
    (pages / "records" / "step_times.json").write_text(json.dumps(content))
    contents = texts(pages, pages / "records")
    assert "time x 0.8" in contents[pages / "README.md"]
    assert "Training step" in contents[pages / "tables.md"]
