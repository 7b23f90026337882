from megatron.config import Config


def test_folders_may_contain_placeholders(flat):
    logging = Config.from_flat({**flat, "seed": 7, "log_dir": "logs/{pos_emb}-{seed}"}).logging
    assert logging.log_dir == "logs/kerple_log-7"
