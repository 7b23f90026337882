from megatron.utils.secrets import without_secrets


def test_keys_and_values_with_secrets_are_removed():
    secrets = {"api_key": 1, "WANDB-API-KEY": 1, "access_token": 1, "password": 1, "client_secret": 1, "private_key": 1}
    secrets |= {"hf_token": "x", "launcher_args": "--export WANDB_API_KEY=x", "data_path": "https://me:word@host/data"}
    harmless = {"tokenizer_type": "x", "eval_tokens": 3, "seed": 1, "key": 2, "nested": [{"maximum_tokens": 1}]}
    harmless |= {"eos_token": "<|endoftext|>", "comment": "a key=1", "url": "https://host:8080/data"}
    assert without_secrets({**secrets, **harmless}) == harmless
    assert without_secrets([secrets, harmless]) == [{}, harmless]
