"""Secrets, personal data and the inside of a network leave the text; indicators stay, for they are the content.

``Redactor(config, load_key(config)).redact(text)`` is pure: the same text, settings and key give the same result on
every machine, in every order. Values are found by ``tokens`` (private keys, service tokens), ``passwords``, ``people``
and ``network``, replaced by ``pseudonyms`` or a marker, and told of by ``report`` as place, class and keyed digest. The
value itself is in no finding, report, error or repr.

Not found: secrets without any sign (a bare random string), names of people in prose, postal addresses, homoglyphs.
"""

from __future__ import annotations

from cyberslm.data.redact.config import CLASS_OF, KINDS, RedactConfig, RedactionKey, load_key
from cyberslm.data.redact.redactor import Finding, Redacted, Redactor
from cyberslm.data.redact.report import RedactionReport, finding_lines

__all__ = [
    "CLASS_OF",
    "KINDS",
    "Finding",
    "RedactConfig",
    "Redacted",
    "RedactionKey",
    "RedactionReport",
    "Redactor",
    "finding_lines",
    "load_key",
]
