"""Recognizing secrets (API keys, tokens, passwords) in configurations and texts, so that they are
never stored.
"""

import os
import re
from typing import Any

_NAME = re.compile(
    r"(api|access|auth|private|secret)_?(key|token)|password|passwd|credential|(^|_)secrets?($|_)"
    r"|(^|_)(hf|hub|bearer)_token|(^|_)token$|(^|_)sig(nature)?$"
)
_HARMLESS = re.compile(
    r"(^|_)(eos|bos|eod|pad|unk|cls|sep|mask|begin|start|end|first|last|next|per|special)_token$"
)
# Environment variables: their names are in upper case, and fewer of them are harmless than of keys
# (eos_token).
_VARIABLE = re.compile(r"(^|_)(TOKEN|KEY|PWD|PASS|PASSPHRASE|CREDENTIALS|JWT|CONNECTION_STRING)$")
_HARMLESS_VARIABLES = ("PWD", "HF_HUB_DISABLE_IMPLICIT_TOKEN")
# In a command line: --NAME VALUE. In any text: NAME=VALUE, NAME: VALUE or "NAME": "VALUE", the
# login of a URL, an HTTP header, or a token of Hugging Face or GitHub.
_OPTION = re.compile(r"(?<![\w-])(?P<option>--(?P<name>[\w-]+)\s+)(?!-)\S+")
_IN_TEXT = re.compile(
    r"""(?<![\w-])(?P<name>[\w-]*"""
    r"""(?:key|token|pass|_pwd|credential|secret|jwt|connection_string|sig)[\w-]*)"""
    r"""(?P<between>["']?\s*[=:]\s*)"""
    r"""(?:"[^"\n]*"|'[^'\n]*'|[^\s"',;&)}\]]+)"""
    r"""|://(?P<login>[^/\s@]+)@"""
    r"""|(?P<bearer>\bBearer )[\w.~+/=-]+"""
    r"""|(?P<token>\b(?:hf_|gh[a-z]_|github_pat_)\w{20,})""",
    re.IGNORECASE,
)
_MIN_SECRET = 6  # shorter values of environment variables would hide harmless words


def is_secret_name(name: str) -> bool:
    """True if a key or an environment variable of this name usually contains a secret: api_key,
    access_token, password, GITHUB_TOKEN, ...
    """
    if name.isupper() and name not in _HARMLESS_VARIABLES and _VARIABLE.search(name):
        return True
    name = name.lower().replace("-", "_")
    return _NAME.search(name) is not None and _HARMLESS.search(name) is None


def contains_secret(text: str) -> bool:
    """True if the text contains a secret, such as WANDB_API_KEY=... or https://user:password@host,
    or the value of an environment variable with a secret's name.
    """
    return redact(text) != text


def without_secrets(value: Any) -> Any:
    """A copy of nested plain values without the keys whose name is a secret's, or whose text or
    list contains one.
    """
    if isinstance(value, dict):
        kept = {}
        for name, item in value.items():
            if not (is_secret_name(str(name)) or _is_secret(item)):
                kept[name] = without_secrets(item)
        return kept
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    return value


def _is_secret(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_is_secret(item) for item in value)
    return isinstance(value, str) and contains_secret(value)


def redact(text: str) -> str:
    """`text` with *** in place of secrets: values of secret names, logins of URLs, and the values
    of environment variables with secret names.
    """
    for name, value in os.environ.items():
        if is_secret_name(name) and len(value) >= _MIN_SECRET:
            text = text.replace(value, "***")
    text = _OPTION.sub(_hide_value, text)
    return _IN_TEXT.sub(_hide, text)


def _hide_value(match: re.Match[str]) -> str:
    """*** in place of the value of an option with a secret name."""
    if not is_secret_name(match["name"]):
        return match[0]
    return f"{match['option']}***"


def _hide(match: re.Match[str]) -> str:
    """*** in place of a secret that `_IN_TEXT` has found."""
    if match["login"] is not None:
        return "://***@"
    if match["bearer"] is not None:
        return "Bearer ***"
    if match["token"] is not None:
        return "***"
    if not is_secret_name(match["name"]):
        return match[0]
    return f"{match['name']}{match['between']}***"
