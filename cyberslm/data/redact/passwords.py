"""Passwords and secrets that a name before them gives away.

One rule reads assignments in every notation: YAML, JSON, INI, XML, code, tables, log lines, ``--password x``, ``the
password is x``. Its price is telling values from what merely stands there: placeholders, references to other names,
calls, types and prose, which ``_is_secret`` knows by their shape. Names that say token, secret or key must hold
something random; names that say password may hold any word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from cyberslm.data.redact.scan import MARKER_HEAD, Scan, Span, words

_ANCHORS = ("pass", "pwd", "secret", "token", "key", "credential", "identified by")
_NAME = re.compile(
    r"(?P<password>passwords?|pass(?:wrd|wd|phrase|code)?|pwd)|(?P<token>secrets?|token|credentials?|key)"
    r"|identified by",
    re.I,
)
_BEFORE = re.compile(r"[\w.-]{0,40}")
_TAIL = re.compile(r"[\w-]{0,30}", re.A)
_TAIL_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_KEY_KINDS = tuple(
    words(
        "api access account secret private encryption encrypt signing sign auth service client master shared storage"
        " hmac license app application consumer session subscription webhook ssh deploy token"
    )
)
_PASS_COMPOUNDS = ("db", "user", "pg", "ssh", "root", "admin", "smtp", "my", "mysql", "redis", "ldap", "ftp", "require")
_NOT_TOKENS = tuple(
    words(
        "max min num next prev total prompt completion input output new stop pad bos eos unk mask page sync"
        " continuation cancellation special per count of"
    )
)
# Words after the name that make it something about a secret, such as password_policy or tokenizer.
_ABOUT = words(
    "config thru through "
    "s file path dir name id ids type count len length limit min max size policy expiry expires expiration ttl age "
    "url uri endpoint field column hint prompt reset rotation required enabled regex pattern label version usage arn "
    "ref store vault manager strength attempt attempts history algorithm format provider ring board word words frame "
    "stroke map space less tab list set bit bits index algo ize izer ized ization ise isation ing ed es ive port er "
    "ion fingerprint"
)

_QUOTE_PREFIX = r"(?:(?:rb?|b|f|u|@|\$)(?=[\"']))?"
_SIGNS = tuple(
    re.compile(pattern, re.I)
    for pattern in (
        # An optional closing quote or bracket, then what assigns: = : => := | or the = of value="...".
        r"(?:\\{0,3}[\"'`])?\]?(?:[ \t]{1,4}(?:value|content))?[ \t]{0,8}"
        r"(?P<sign>:=|=>|={1,3}|->|:(?!:)|(?<=[ \t])\|)[ \t]{0,8}" + _QUOTE_PREFIX + r"(?=\S)",
        r"(?P<sign>>)(?=[^<>\s]{1,200}</)",
        r"(?P<sign> [05789] )(?=\S)",
        r"(?P<sign>(?: (?:for|of|to|on) [\w.@\\/-]{1,60}(?: [\w.@\\/-]{1,60})?)?"
        r" (?:is|was|is now|set to|changed to)(?: now)?:? )(?=\S)",
        r"(?P<sign>[ \t]{1,4})(?=['\"])",
        r"[\"'](?P<sign>[ ]?,)[ ]?(?=[\"'])",
    )
)
_SETTER = re.compile(r"(?:define|put|set\w{0,20}|add\w{0,20}|env)\([\"'][\w.-]{0,30}$", re.I)
_OPERAND_LINE = re.compile(r"\s*(?:.{0,80}\b(?:login|username|user|enable)\s\S{1,60}\s)?\s*(?:enable )?", re.I)
_OPERAND = re.compile(r"[ \t]{1,4}(?!CVE|CWE|CAPEC|T\d)(?=\S{0,40}[0-9!#$%&*?@^])[^\s\"'<>]{6,64}[ \t\r]{0,4}(?:\n|\Z)")
_FLAG = re.compile(r"(?P<sign>[ \t]{1,4})(?=\S)")
_ESCAPED = re.compile(r"\\{1,3}(?P<quote>[\"'])(?P<value>[^\"'\\\r\n]{1,1024}+)\\")
_QUOTED = re.compile(r"(?P<quote>[\"'`])(?P<value>(?:(?!(?P=quote))[^\\\r\n]|\\.){1,1024}+)(?P=quote)")
_BARE = re.compile(
    r"[\"'`]?(?P<value>(?:[^\s\"'`;&<>,|\\]|,(?![\s\"'}]|$|\w{1,40}[=:])|\\(?![nrt\"'])|&(?!\w{1,40}=)){1,4096}+)"
)

PLACEHOLDER = re.compile(
    r"[<\[({%].*[>\])}%]|\$[({]?[A-Za-z_][\w.:-]*[)}]?.*|%\w+%?|[*xX.\-_#?~+]{3,}|(?:<|\{\{|\$\{|\[|%\().*"
    r"|(?:your|my|the|some|new|old|change|enter|insert|replace|put|dummy|fake|sample|example|test|todo|tbd)"
    r"(?:[_ .-]?[a-z]+)*[_ .-]?"
    r"|(?:arn|https?|vault|env|file|secretsmanager|keyring|op|gcp|ssm):.*|ENC\[.*|(?:os\.environ|process\.env|os\.getenv|getenv)\b.*|!(?:vault|secret|ref|sub|env)\b.*"
    r"|(?:none|null|nil|true|false|yes|no|undefined|empty|redacted|removed|hidden|masked|secret|password|pass|passwd|pwd"
    r"|token|changeme|changeit|placeholder|foobar|foo|bar|n/a|na)[!.]{0,2}",
    re.I,
)
_MENTION = re.compile(r"[A-Za-z_./-]*(?:pass(?:w(?:or)?d)?|pwd|secret|token|api_?key|credentials?)[A-Za-z_./-]*", re.I)
_CODE = re.compile(
    r"[A-Za-z_][\w.]*[(\[].*|[A-Za-z_]+(?:(?:\.|->)[A-Za-z_]+)+|\([^)]*|[a-z]+(?:_[a-z]+)+|[A-Z]+(?:_[A-Z]+)+", re.A
)
_PROSE = re.compile(r"[ ][A-Za-z]?[a-z]{0,20}(?=[ .,;!?\n]|$)")
_PATH = re.compile(r"(?:~?/|\.{1,2}/|[A-Za-z]:\\)\S*[/\\]|\\\\")
_NUMBERED = re.compile(r"[A-Za-z]+(?:[-_.][A-Za-z]+)*[-_.]?v?[0-9]{1,4}")
_WORD = re.compile(r"[A-Za-z][a-z]*|[A-Z]+")
# Names inside a longer value that is no secret aren't read again, or a line of names would take quadratic time.
_MAX_REREAD = 200
_OPENING = {")": "(", "]": "[", "}": "{"}
_STATES = words(
    "str string bytes int bool float char text optional any object void const var let self this required incorrect "
    "invalid expired wrong missing reset correct field input prompt disabled enabled must should cannot can not for "
    "and or to of in is was are be with authentication protected policy default auto unset unknown unchanged never "
    "always manager management spraying hash hashes hashing cracking reuse rotation guessing attack attacks based "
    "only login here below above publickey keyboard interactive varchar nvarchar readonly plaintext encrypted basic "
    "bearer digest success failed failure accepted rejected denied verify verified check checked ok set sent used "
    "user users access file strong weak blank raise pass return continue leaked stolen exposed changed"
)


class _Candidate(NamedTuple):
    """A value and what is known of where it stands."""

    value: str
    name: str
    sort: str
    """password, token, or sql for IDENTIFIED BY"""
    quoted: bool
    sign: str
    after: str
    """Up to 24 characters that follow."""


def assignments(scan: Scan) -> Iterator[Span]:
    """Values assigned to names that say password, secret, token or key."""
    text, done = scan.text, 0
    for at in sorted(scan.anchors(_ANCHORS)):
        named = _NAME.match(text, at) if at >= done else None
        if named is None or not _names_secret(scan, named):
            continue
        found = _assigned(scan, named)
        if found is None:
            continue
        match, sign = found
        quoted = match.re is not _BARE
        value = match["value"] if quoted else _trim(match["value"])
        start, end = match.start("value"), match.start("value") + len(value)
        sort = named.lastgroup or "sql"
        if _is_secret(_Candidate(value, named[0].lower(), sort, quoted, sign, text[end : end + 24])):
            done = end
            yield Span(start, end, "keyed-secret" if sort == "token" else "password")
        elif len(value) > _MAX_REREAD:
            done = end


def _names_secret(scan: Scan, named: re.Match[str]) -> bool:
    """Whether the word stands for a secret: not bypass or compass, max_tokens, a mere key, or a marker of ours."""
    at, word = named.start(), named[0]
    before = scan.text[max(0, at - 24) : at]
    if "]" not in before.rpartition(MARKER_HEAD)[2] and MARKER_HEAD in before:
        return False
    if word.lower() == "key":
        return _last_word(before).endswith(_KEY_KINDS)
    if named.lastgroup == "token":
        return not _last_word(before).endswith(_NOT_TOKENS)
    if word.lower() != "pass":
        return True
    after, last = scan.text[named.end() : named.end() + 1], before[-1:]
    if after.isalpha() and after.islower():
        return False
    return not last.isalpha() or (word[0] == "P" and last.islower()) or before.lower().endswith(_PASS_COMPOUNDS)


def _last_word(before: str) -> str:
    """What precedes the name in lower case, without one separator."""
    return (before[:-1] if before[-1:] in ("_", ".", " ", "-") else before).lower()


def _assigned(scan: Scan, named: re.Match[str]) -> tuple[re.Match[str], str] | None:
    """The value after a name and what assigns it; None when nothing is, or the name goes on to mean something else."""
    text = scan.text
    tail = _TAIL.match(text, named.end())
    end = tail.end() if tail else named.end()
    if any(word.lower() in _ABOUT for word in _TAIL_WORDS.findall(text[named.end() : end])):
        return None
    sign = next((found for pattern in _SIGNS if (found := pattern.match(text, end))), None)
    if sign is not None and named[0].lower() == "pass" and not sign["sign"].strip():
        return None
    if sign is None and _takes_operand(scan, named, end):
        sign = _FLAG.match(text, end)
    if sign is None or (
        sign["sign"].strip() == "," and not _SETTER.search(text, max(0, named.start() - 60), named.start())
    ):
        return None
    value = next((found for pattern in (_ESCAPED, _QUOTED, _BARE) if (found := pattern.match(text, sign.end()))), None)
    return (value, sign["sign"].strip().lower()) if value else None


def _takes_operand(scan: Scan, named: re.Match[str], end: int) -> bool:
    """Whether a value follows after mere space: ``--password x``, ``/pass x``, or a line of a netrc or router file."""
    text = scan.text
    start = scan.back(named.start(), _BEFORE, 40)
    if text[start : start + 1] == "-" or text[max(0, start - 1) : start] == "/":
        return True
    line = max(0, start - 120, text.rfind("\n", 0, start) + 1)
    return bool(_OPERAND_LINE.fullmatch(text, line, start) and _OPERAND.match(text, end))


def _trim(value: str) -> str:
    """Without the closing marks of the sentence or structure around a bare value."""
    while value and value[-1] in ".)]},:*" and _OPENING.get(value[-1], "\0") not in value:
        value = value[:-1]
    return value


def _is_secret(found: _Candidate) -> bool:
    value = found.value
    if len(value) < 4 or value.isspace() or PLACEHOLDER.fullmatch(value) or _MENTION.fullmatch(value):
        return False
    if not found.quoted and _CODE.fullmatch(value):
        return False
    if found.sort == "token":
        return _is_random(value)
    if _PATH.match(value):
        return False
    if value.isalpha():
        return _may_be_word(found)
    return not (found.name == "pass" and value.isdigit() and len(value) < 6)


def _may_be_word(found: _Candidate) -> bool:
    """Whether letters alone are a password: quoted, or alone where only a value can stand."""
    if found.value.lower() in _STATES:
        return False
    if found.quoted:
        return True
    is_value = found.sign in ("=", ":", ":=", "|", ">") and len(found.value) >= 5
    return is_value and found.after[:1] not in ("(", "[") and not _PROSE.match(found.after)


def _is_random(value: str) -> bool:
    """Long and of many characters, and no word, name or number: what a generator makes and people don't."""
    if len(value) < 12 or " " in value or _NUMBERED.fullmatch(value):
        return False
    digits = sum(map(str.isdigit, value))
    letters = sum(map(str.isalpha, value))
    distinct = len(set(value))
    if digits:
        return letters >= 2 and digits >= 2 and distinct >= 8
    return len(value) >= 20 and distinct >= 12 and not value.islower() and len(_WORD.findall(value)) * 4 > len(value)
