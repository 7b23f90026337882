"""Wrong values of several kinds, and valid evaluation records."""

from typing import Any

from tests.support.records import passkey_record, record

WRONG_VALUES: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        1,
        2**31,
        2**63,
        10**30,
        1e308,
        float("inf"),
        float("nan"),
        0.5,
        "",
        "abc",
        "\0",
        "\x1b[31m",
    ),
    *(
        "../../escaped",
        "/dev/zero",
        "x" * 300,
        "\ud800",
        "global_step300",
        [],
        {},
        [[]],
        [1, "a", None],
        {"a": {}},
    ),
]


def valid_records(name: str = "kerple_log") -> list[dict[str, Any]]:
    """Records of every kind, of two methods, seeds and lengths, with the keys that evaluate.py
    writes.
    """
    records = []
    for pos_emb, offset in ((name, 0.0), ("alibi", 0.2)):
        for seed in (1, 2):
            for length in (32, 64):
                loss = 2.0 + offset + seed / 100
                keys: dict[str, Any] = {
                    "segments": 4,
                    "documents": 2,
                    "stderr": 0.1,
                    "bits_per_byte": 1.5,
                }
                keys |= {"targets": "ab", "measurement": "cd", "loss": loss}
                keys |= {"groups": {"tokens": [500, 500], "losses": [loss, loss]}}
                losses = record(pos_emb, length, 8.0 + offset, seed, **keys)
                positions = {
                    "kind": "positions",
                    "edges": [0, 16, 32],
                    "losses": [loss, loss],
                    "counts": [9, 9],
                }
                resolution = {
                    "kind": "resolution",
                    "texts": 2,
                    "layers": [0.1, 0.2],
                    "resolution": 0.15,
                }
                effective = {
                    "kind": "effective_length",
                    "layers": ["all layers"],
                    "effective_lengths": [[3, 9]],
                }
                passkey = passkey_record(pos_emb, length, 0.5, 0.4, seed=seed, measurement="ef")
                records += [
                    losses,
                    {**losses, **positions},
                    {**losses, **resolution},
                    {**losses, **effective},
                    passkey,
                ]
    return records
