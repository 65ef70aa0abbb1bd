"""Plain YAML scalars by the YAML 1.2 core schema (yaml.org/spec/1.2.2, section 10.3), and back.

PyYAML resolves by YAML 1.1, where ``no`` is false, ``12:30:45`` is 45045 and ``1e-4`` is text. Here only
``true/True/TRUE`` and ``false/False/FALSE`` are booleans, ``1e-4`` and ``1_000_000`` are numbers, and ``010`` stays
text because YAML 1.1 would read 8. What is written back reads the same under both versions.
"""

from __future__ import annotations

import math
import re

import yaml

from cyberslm.errors import ConfigError

MAX_NUMBER_CHARS = 64

_CONSTANTS: dict[str, None | bool] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_CONSTANTS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_DIGITS = r"(?:0|[1-9][0-9]*(?:_[0-9]+)*)"
_INTEGER = re.compile(rf"[-+]?{_DIGITS}")
_PREFIXED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(rf"[-+]?(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+(?:\.[0-9]*)?")
_SAFE = re.compile(r"[A-Za-z/][A-Za-z0-9_./+-]*")
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


def resolve(text: str) -> None | bool | int | float | str:
    """The value of a plain scalar. Raises ``ValueError`` for numbers that are not finite or absurdly long."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _NOT_FINITE.fullmatch(text):
        raise ValueError(f"numbers must be finite, got {text}")
    is_integer, is_prefixed = _INTEGER.fullmatch(text), _PREFIXED.fullmatch(text)
    if not (is_integer or is_prefixed or _FLOAT.fullmatch(text)):
        return text
    if len(text) > MAX_NUMBER_CHARS:
        raise ValueError(f"a number of {len(text):,} characters; at most {MAX_NUMBER_CHARS} are read (quote text)")
    if is_prefixed:
        return int(text, 0)
    if is_integer:
        return int(text)
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"numbers must be finite, and {text} is too large for a float")
    return number


def has_leading_zero(text: str) -> bool:
    """Whether a plain scalar looks like a number that YAML 1.1 and 1.2 read differently."""
    return _LEADING_ZERO.fullmatch(text) is not None


def write(value: object) -> str:
    """A scalar as YAML that reads back equal, type included. Raises ``ConfigError`` for a number that is not finite."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ConfigError(f"numbers must be finite to be written as YAML, got {value}")
        mantissa, exponent, power = repr(value).partition("e")
        return mantissa + ("" if "." in mantissa else ".0") + exponent + power
    if isinstance(value, int):
        return str(value)
    text = str(value)
    if _SAFE.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return yaml.safe_dump(text, default_style='"', allow_unicode=True, width=math.inf).rstrip("\n")
