"""What is asked of a JSON schema before it is compiled: size, depth, and keywords that mean something.

The compiler refuses by itself what it knows and can't do (``not``, ``contains``) and what contradicts itself. It passes
over keywords that it doesn't know, as the JSON Schema specification asks; a misspelt ``maxLenght`` would then bind
nothing, so that unknown keywords are refused here.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cyberslm.errors import GenerationError

MAX_SCHEMA_CHARS = 1 << 18
MAX_DEPTH = 64

_ONE = frozenset({"items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains"})
_ONE_MORE = frozenset({"propertyNames", "unevaluatedItems", "unevaluatedProperties"})
_SEVERAL = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset(
    {
        "type",
        "enum",
        "const",
        "required",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minItems",
        "maxItems",
        "uniqueItems",
        "minProperties",
        "maxProperties",
        "minContains",
        "maxContains",
        "dependentRequired",
        "dependencies",
        "$ref",
        "$id",
        "$schema",
        "$anchor",
        "$dynamicRef",
        "$dynamicAnchor",
        "$vocabulary",
    }
)
_NOTES = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "contentMediaType",
        "contentEncoding",
        "contentSchema",
        "discriminator",
    }
)
KEYWORDS = _ONE | _ONE_MORE | _SEVERAL | _NAMED | _VALUES | _NOTES


def checked(schema: str | Mapping[str, Any]) -> str:
    """A schema as JSON text. Raises `GenerationError` naming the place of what is too large, too deep or unknown."""
    if isinstance(schema, str):
        if len(schema) > MAX_SCHEMA_CHARS:
            raise GenerationError(f"the JSON schema has {len(schema)} characters; at most {MAX_SCHEMA_CHARS} are taken")
        schema = _parsed(schema)
    if not isinstance(schema, Mapping):
        raise GenerationError(f"a JSON schema must be an object, not {schema!r:.40}")
    for place, keyword in _keywords(schema, "#", 0):
        if keyword not in KEYWORDS and not keyword.startswith("x-"):
            near = difflib.get_close_matches(keyword, KEYWORDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "a note of your own must begin with x-"
            raise GenerationError(f"the JSON schema has the unknown keyword {keyword!r:.60} at {place}; {hint}")
    try:
        text = json.dumps(_with_ascii_digits(schema), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise GenerationError(f"the JSON schema can't be written as JSON: {error}") from error
    if len(text) > MAX_SCHEMA_CHARS:
        raise GenerationError(f"the JSON schema has {len(text)} characters; at most {MAX_SCHEMA_CHARS} are taken")
    return text


def ascii_digits(pattern: str) -> str:
    r"""A regular expression in which ``\d`` is 0 to 9: any other digit would be no copy of one that was given."""
    return re.sub(r"\\(.)", lambda found: "[0-9]" if found[1] == "d" else found[0], pattern, flags=re.DOTALL)


def _with_ascii_digits(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_ascii_digits(inner) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: ascii_digits(value)
        if key == "pattern" and isinstance(value, str)
        else value
        if key in _VALUES
        else _with_ascii_digits(value)
        for key, value in schema.items()
    }


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GenerationError(f"the JSON schema is not JSON: {error}") from error


def _keywords(schema: Any, place: str, depth: int) -> Iterator[tuple[str, str]]:
    """Every keyword of a schema and of those inside it, with its place."""
    if depth > MAX_DEPTH:
        raise GenerationError(f"the JSON schema is nested deeper than {MAX_DEPTH} at {place:.80}")
    if not isinstance(schema, Mapping):
        return
    for keyword, value in schema.items():
        yield place, str(keyword)
        for name, inner in _inner(keyword, value):
            yield from _keywords(inner, f"{place}/{name}", depth + 1)


def _inner(keyword: str, value: Any) -> Iterator[tuple[str, Any]]:
    if keyword in _ONE | _ONE_MORE and not isinstance(value, list):
        yield keyword, value
    elif (keyword in _SEVERAL or keyword == "items") and isinstance(value, list):
        yield from ((f"{keyword}/{at}", inner) for at, inner in enumerate(value))
    elif keyword in _NAMED and isinstance(value, Mapping):
        yield from ((f"{keyword}/{name}", inner) for name, inner in value.items())
