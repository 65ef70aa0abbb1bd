"""Constraints that security work asks for again and again, by name: `PRESETS`.

Sources: CVSS v3.1 specification (section 6) and v4.0 (section 7) for metrics, their order and values; STIX 2.1 for the
indicator object (sections 3 and 4.7), RFC 4122 for its id; the Sigma rule specification. A preset makes the form right;
what it says is the model's.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from cyberslm.errors import GenerationError
from cyberslm.generation.constrain import Constraint
from cyberslm.generation.identifiers import KINDS, find

Metrics = tuple[tuple[str, str], ...]

_CVSS31: Metrics = (
    ("AV", "[NALP]"),
    ("AC", "[LH]"),
    ("PR", "[NLH]"),
    ("UI", "[NR]"),
    ("S", "[UC]"),
    *((name, "[HLN]") for name in ("C", "I", "A")),
)
_CVSS31_OPTIONAL: Metrics = (
    ("E", "[XUPFH]"),
    ("RL", "[XOTWU]"),
    ("RC", "[XURC]"),
    *((name, "[XLMH]") for name in ("CR", "IR", "AR")),
    ("MAV", "[XNALP]"),
    ("MAC", "[XLH]"),
    ("MPR", "[XNLH]"),
    ("MUI", "[XNR]"),
    ("MS", "[XUC]"),
    *((name, "[XNLH]") for name in ("MC", "MI", "MA")),
)
_CVSS40: Metrics = (
    ("AV", "[NALP]"),
    ("AC", "[LH]"),
    ("AT", "[NP]"),
    ("PR", "[NLH]"),
    ("UI", "[NPA]"),
    *((name, "[HLN]") for name in ("VC", "VI", "VA", "SC", "SI", "SA")),
)
_CVSS40_OPTIONAL: Metrics = (
    ("E", "[XAPU]"),
    *((name, "[XHML]") for name in ("CR", "IR", "AR")),
    ("MAV", "[XNALP]"),
    ("MAC", "[XLH]"),
    ("MAT", "[XNP]"),
    ("MPR", "[XNLH]"),
    ("MUI", "[XNPA]"),
    *((name, "[XNLH]") for name in ("MVC", "MVI", "MVA", "MSC")),
    *((name, "[XSNLH]") for name in ("MSI", "MSA")),
    ("S", "[XNP]"),
    ("AU", "[XNY]"),
    ("R", "[XAUI]"),
    ("V", "[XDC]"),
    ("RE", "[XLMH]"),
    ("U", "(?:X|Clear|Green|Amber|Red)"),
)

_UUID = "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
_LONG_MONTHS = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT_MONTHS = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_MONTH_DAY = f"(?:{_LONG_MONTHS}|{_SHORT_MONTHS}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DAY = "20[0-9]{2}-" + _MONTH_DAY
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[a-z0-9](?:[a-z0-9-]{0,20}[a-z0-9])?"
_HOST = rf"(?:{_LABEL}\.){{1,3}}[a-z]{{2,8}}"
_HASH_SIZES = {"MD5": 32, "'SHA-1'": 40, "'SHA-256'": 64}
_OBSERVED = (
    ("ipv4-addr:value", rf"(?:{_OCTET}\.){{3}}{_OCTET}"),
    ("domain-name:value", _HOST),
    ("url:value", rf"https?://{_HOST}(?:/[A-Za-z0-9._~-]{{1,30}}){{0,4}}"),
    ("email-addr:value", rf"[a-z0-9]{{1,20}}@{_HOST}"),
    *((f"file:hashes.{name}", f"[0-9a-f]{{{size}}}") for name, size in _HASH_SIZES.items()),
)
_PATHS = {"ipv4": "ipv4-addr", "ipv6": "ipv6-addr", "domain": "domain-name", "url": "url", "email": "email-addr"}
_INDICATOR_TYPES = (
    "anomalous-activity",
    "anonymization",
    "benign",
    "compromised",
    "malicious-activity",
    "attribution",
    "unknown",
)

_TECHNIQUE = re.compile(r"\bT[0-9]{4}(?:\.[0-9]{3})?\b", re.ASCII)
_WEAKNESS = re.compile(r"\bCWE-[0-9]{1,5}\b", re.ASCII)

_SIGMA = r"""
start: head tags? logsource detection falsepositives? "level: " LEVEL "\n"
head: "title: " TEXT "\nid: " UUID "\nstatus: " STATUS "\ndescription: " TEXT "\ndate: " DATE "\n"
tags: "tags:\n" ("    - " TAG "\n")~1..4
logsource: "logsource:\n    category: " NAME "\n    product: " NAME "\n" ("    service: " NAME "\n")?
detection: "detection:\n" (filtered | plain)
plain: selection "    condition: selection\n"
filtered: selection "    filter:\n" field~1..3 "    condition: selection and not filter\n"
selection: "    selection:\n" field~1..4
field: "        " FIELD ": " TEXT "\n" | "        " FIELD ":\n" ("            - " TEXT "\n")~1..4
falsepositives: "falsepositives:\n" ("    - " TEXT "\n")~1..3
TEXT: /'[!-&(-~][ -&(-~]{0,79}'/
TAG: /attack\.(?:t[0-9]{4}(?:\.[0-9]{3})?|execution|persistence|discovery|collection|exfiltration|impact)/
NAME: /[a-z][a-z_]{1,23}/
FIELD: /[A-Z][A-Za-z]{1,23}(?:\|(?:contains|startswith|endswith|re))?/
"""
_SIGMA_TERMINALS = (
    f"UUID: /{_UUID}/\nDATE: /{_DAY}/\n"
    'STATUS: "stable" | "test" | "experimental"\nLEVEL: "informational" | "low" | "medium" | "high" | "critical"\n'
)


class Asked(NamedTuple):
    """How a preset is wanted: the ids to choose from, and whether optional parts may come."""

    ids: tuple[str, ...]
    optional: bool


@dataclass(frozen=True)
class Preset:
    """One named constraint."""

    summary: str
    make: Callable[[Asked], Constraint]
    ids: Callable[[str], Iterable[str]] | None = None
    """Reads from a text what it may choose from."""

    needs_ids: bool = False
    """Whether it can't do without."""


def _vector(version: str, base: Metrics, optional: Metrics) -> Callable[[Asked], Constraint]:
    def make(asked: Asked) -> Constraint:
        metrics = "".join(f"/{name}:{values}" for name, values in base)
        extra = "".join(f"(?:/{name}:{values})?" for name, values in optional) if asked.optional else ""
        return Constraint.regex(f"CVSS:{re.escape(version)}{metrics}{extra}")

    return make


def _object(properties: dict[str, Any], required: Iterable[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _escaped(text: str) -> str:
    return re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", text)


def _comparisons(text: str) -> Iterable[str]:
    """The identifiers of a text as comparisons of a STIX pattern."""
    for kind in (*_PATHS, "hash"):
        for value in find(KINDS[kind], text.encode("utf-8", "replace")):
            name = value.decode("utf-8", "replace")
            if kind == "hash":
                yield from (f"file:hashes.{path} = '{name}'" for path, size in _HASH_SIZES.items() if len(name) == size)
            elif not kind.startswith("ip") or _is_address(name):
                yield f"{_PATHS[kind]}:value = '{re.sub('^hxxp', 'http', name)}'"


def _is_address(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return True


def _stix_pattern(comparisons: tuple[str, ...]) -> str:
    some = [_escaped(one) for one in comparisons]
    free = [f"{_escaped(path)} = '{value}'" for path, value in _OBSERVED]
    comparison = f"(?:{'|'.join(some or free)})"
    return rf"\[{comparison}(?: (?:AND|OR) {comparison}){{0,2}}\]"


def _indicator(asked: Asked) -> Constraint:
    moment = {"type": "string", "pattern": rf"^{_DAY}T{_TIME}\.[0-9]{{3}}Z$"}
    properties: dict[str, Any] = {
        "type": {"const": "indicator"},
        "spec_version": {"const": "2.1"},
        "id": {"type": "string", "pattern": f"^indicator--{_UUID}$"},
        "created": moment,
        "modified": moment,
        "name": {"type": "string", "minLength": 1, "maxLength": 80},
        "indicator_types": {"type": "array", "items": {"enum": list(_INDICATOR_TYPES)}, "minItems": 1, "maxItems": 1},
        "pattern": {"type": "string", "pattern": f"^{_stix_pattern(asked.ids)}$"},
        "pattern_type": {"const": "stix"},
        "valid_from": moment,
    }
    required = tuple(properties)
    if asked.optional:
        properties["description"] = {"type": "string", "minLength": 1, "maxLength": 300}
        properties["confidence"] = {"type": "integer", "minimum": 0, "maximum": 100}
    return Constraint.json_schema(_object(properties, required))


def _verdict(_: Asked) -> Constraint:
    properties = {
        "verdict": {"enum": ["benign", "suspicious", "malicious", "unknown"]},
        "confidence": {"type": "integer", "minimum": 0, "maximum": 100},
        "reason": {"type": "string", "minLength": 1, "maxLength": 300},
    }
    return Constraint.json_schema(_object(properties, properties))


def _sigma(asked: Asked) -> Constraint:
    rules = _SIGMA if asked.optional else _SIGMA.replace(" tags?", "").replace(" falsepositives?", "")
    if not asked.optional:
        rules = "\n".join(
            line for line in rules.split("\n") if not line.startswith(("tags:", "falsepositives:", "TAG:"))
        )
    return Constraint.grammar(rules.strip() + "\n" + _SIGMA_TERMINALS)


def _listed(asked: Asked) -> Constraint:
    return Constraint.choice(asked.ids)


PRESETS: dict[str, Preset] = {
    "cvss31": Preset("CVSS v3.1 vector", _vector("3.1", _CVSS31, _CVSS31_OPTIONAL)),
    "cvss40": Preset("CVSS v4.0 vector", _vector("4.0", _CVSS40, _CVSS40_OPTIONAL)),
    "stix-indicator": Preset(
        "STIX 2.1 indicator object, its pattern over given identifiers or free ones", _indicator, _comparisons
    ),
    "sigma": Preset("Sigma rule skeleton", _sigma),
    "verdict": Preset("triage verdict as JSON: verdict, confidence in percent, reason", _verdict),
    "attack": Preset("ATT&CK technique id of a given list", _listed, _TECHNIQUE.findall, needs_ids=True),
    "cwe": Preset("CWE id of a given list", _listed, _WEAKNESS.findall, needs_ids=True),
}


def preset(name: str, *, ids: str | Iterable[str] = (), optional: bool = False) -> Constraint:
    """The constraint of a name in `PRESETS`.

    ``ids`` is what a closed list is read from: a list, or any text that names them (identifiers for stix-indicator).
    ``optional`` also lets optional metrics, fields and sections come. Raises `GenerationError` for an unknown name and
    for a list that is missing.
    """
    if name not in PRESETS:
        raise GenerationError(f"there is no preset {name!r:.40}; presets: {', '.join(PRESETS)}")
    chosen = PRESETS[name]
    text = ids if isinstance(ids, str) else "\n".join(ids)
    if text and chosen.ids is None:
        raise GenerationError(f"the preset {name} takes no list of ids; only stix-indicator, attack and cwe do")
    found = tuple(sorted(set(chosen.ids(text)))) if chosen.ids is not None else ()
    if not found and (text or chosen.needs_ids):
        raise GenerationError(f"the preset {name} needs ids to choose from, and none is in what was given")
    return chosen.make(Asked(found, optional=optional))
