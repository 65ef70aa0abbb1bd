from __future__ import annotations

import json

import pytest

from cyberslm.errors import GenerationError
from cyberslm.generation.schemas import MAX_DEPTH, MAX_SCHEMA_CHARS, checked


def nested(depth: int) -> dict[str, object]:
    return {"type": "string"} if depth == 0 else {"items": nested(depth - 1)}


def test_names_of_properties_and_notes_are_no_keywords() -> None:
    schema = {
        "properties": {"maxLenght": {"type": "string"}},
        "x-owner": 1,
        "examples": [{"odd": 1}],
        "enum": [{"a": 1}],
    }
    assert json.loads(checked(schema)) == schema
    assert checked(json.dumps(schema)) == checked(schema)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"maxLenght": 3}, "unknown keyword 'maxLenght' at #; did you mean 'maxLength'?"),
        ({"anyOf": [{}, {"properties": {"a": {"zzz": 1}}}]}, "unknown keyword 'zzz' at #/anyOf/1/properties/a"),
        ({"$defs": {"x": {"pattrn": "a"}}}, "did you mean 'pattern'"),
        ({"items": [{"typ": "string"}]}, "did you mean 'type'"),
        ("[1, 2]", "must be an object"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ({"enum": [object()]}, "can't be written as JSON"),
        (nested(MAX_DEPTH + 1), f"nested deeper than {MAX_DEPTH}"),
        (" " * (MAX_SCHEMA_CHARS + 1), f"at most {MAX_SCHEMA_CHARS}"),
        ({"enum": ["a" * MAX_SCHEMA_CHARS]}, f"at most {MAX_SCHEMA_CHARS}"),
    ],
)
def test_what_is_no_schema_is_refused_with_its_place(schema: object, message: str) -> None:
    with pytest.raises(GenerationError) as refused:
        checked(schema)  # type: ignore[arg-type]
    assert message in str(refused.value)


def test_the_deepest_schema_is_taken() -> None:
    assert checked(nested(MAX_DEPTH))
