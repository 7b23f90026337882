from tests.support.token_files import tokenizer_file  # noqa: F401 (a fixture)
