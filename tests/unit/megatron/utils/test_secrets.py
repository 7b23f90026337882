import pytest

from megatron.utils.secrets import redact, without_secrets


def test_keys_and_values_with_secrets_are_removed():
    secrets = {
        "api_key": 1,
        "WANDB-API-KEY": 1,
        "access_token": 1,
        "password": 1,
        "client_secret": 1,
        "private_key": 1,
    }
    secrets |= {
        "hf_token": "x",
        "launcher_args": "--export WANDB_API_KEY=x",
        "data_path": "https://me:word@host/data",
    }
    secrets |= {
        "train_data_paths": ["a", "https://me:word@host/data"],
        "repository": "https://token@host/data",
    }
    secrets |= {
        "url": "https://host/data?X-Amz-Signature=ab",
        "header": "Bearer ab",
        "text": "api_key: ab",
    }
    secrets |= {"words": "a hf_" + "a1" * 17, "gitlab_token": "x", "option": "--my_token=abc"}
    harmless = {
        "tokenizer_type": "x",
        "eval_tokens": 3,
        "seed": 1,
        "key": 2,
        "nested": [{"maximum_tokens": 1}],
    }
    harmless |= {
        "eos_token": "<|endoftext|>",
        "comment": "a key=1, token",
        "address": "https://host:8080/data",
    }
    harmless |= {"file": "git@host:data", "drive": "C:/token", "activation": "sigmoid"}
    assert without_secrets({**secrets, **harmless}) == harmless
    assert without_secrets([secrets, harmless]) == [{}, harmless]


def test_values_of_secret_environment_variables_are_removed(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    monkeypatch.setenv("SOME_NAME", "abcdefghij")
    assert without_secrets({"wandb_group": "0123456789", "comment": "abcdefghij"}) == {
        "comment": "abcdefghij"
    }
    longer = {
        "save": "runs/0123456789/a",
        "wandb_run_name": "x0123456789y",
        "names": ["a", "b 0123456789"],
    }
    assert without_secrets({**longer, "seed": "012345678"}) == {"seed": "012345678"}

    # Short values are words of their own.
    for value, is_hidden in (("abcdef", True), ("abcde", False)):
        monkeypatch.setenv("WANDB_API_KEY", value)
        assert redact(f"a {value} b") == f"a {'***' if is_hidden else value} b"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--set wandb_api_key=abc seed=1", "--set wandb_api_key=*** seed=1"),
        ('{"hf_token": "abc def", "seed": 1}', '{"hf_token": ***, "seed": 1}'),
        ("password='a'", "password=***"),
        (
            "GITHUB_TOKEN=a MYSQL_PWD=b PWD=/c eos_token=d",
            "GITHUB_TOKEN=*** MYSQL_PWD=*** PWD=/c eos_token=d",
        ),
        (
            "GET https://me:word@host/data?access_token=abc&x=1",
            "GET https://***@host/data?access_token=***&x=1",
        ),
        ("https://token@host/data?sig=ab", "https://***@host/data?sig=***"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        (
            "unrecognized arguments: --wandb-api-key abc -x",
            "unrecognized arguments: --wandb-api-key *** -x",
        ),
        ("--hf-token abc --seed 1", "--hf-token *** --seed 1"),
        (
            "--tokens abc --text-key content --password --seed 1",
            "--tokens abc --text-key content --password --seed 1",
        ),
        ("KeyError: 'tokenizer'", "KeyError: 'tokenizer'"),
        ("the value of WANDB_API_KEY is 0123456789", "the value of WANDB_API_KEY is ***"),
        ("the value of OPENAI_KEY is abcdefgh", "the value of OPENAI_KEY is ***"),
    ],
)
def test_redact(text, expected, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    monkeypatch.setenv("OPENAI_KEY", "abcdefgh")
    assert redact(text) == expected
