"""A YAML file plus ``key=value`` arguments become frozen dataclasses, or an error that says where and what to write.

A consumer declares its settings as a plain frozen dataclass beside its code; this package is the border between that
and text. Text is read as a tree of nodes that remember file and line (``reader``), checked against the dataclasses
(``schema``, ``build``), layered as defaults < extends < file < command line (``loading``) and written (``writing``).

Invariant: nothing given is ignored. A key that no dataclass field claims, a value of another type and a key given
twice in a file are errors, and one message lists all of them. Scalars follow the YAML 1.2 core schema (``scalars``).
"""

from __future__ import annotations

from cyberslm.config.loading import Loaded, load, parse, top_keys
from cyberslm.config.schema import FieldDoc, PathStr, documented_fields
from cyberslm.config.writing import LEFT_OUT, differences, dump, template, to_mapping

__all__ = [
    "LEFT_OUT",
    "FieldDoc",
    "Loaded",
    "PathStr",
    "differences",
    "documented_fields",
    "dump",
    "load",
    "parse",
    "template",
    "to_mapping",
    "top_keys",
]
