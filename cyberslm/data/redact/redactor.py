"""Find, settle overlaps, replace, and look again until nothing is left: that is redaction.

Invariant: what ``redact`` returns is a fixed point of it. Stand-ins are recognised (``pseudonyms``), and since a
replacement could complete a find with the text beside it, changed lines are looked at again; a line that won't settle
is replaced whole. Overlapping finds become one that covers them all and bears the most severe kind, so that no part of
a longer secret survives because a shorter one was found inside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from cyberslm.data.redact import commands, network, passwords, people, tokens
from cyberslm.data.redact.config import CLASS_OF, KINDS, MIN_KEY_BYTES, RedactConfig, RedactionKey
from cyberslm.data.redact.pseudonyms import Pseudonyms
from cyberslm.data.redact.scan import MARKER_HEAD, Scan, Span, Visible, visible
from cyberslm.errors import InputError

_MAX_PASSES: Final = 16
_SEVERITY = {name: rank for rank, name in enumerate(KINDS)}
Rule = Callable[[Scan], Iterator[Span]]


class Finding(NamedTuple):
    """One value in the text before redaction: characters ``start`` to ``end``, first line ``line`` (from 1).

    ``digest`` is keyed and 128 bits; the value itself is nowhere in it.
    """

    kind: str
    line: int
    start: int
    end: int
    digest: str

    @property
    def cls(self) -> str:
        """The class that the kind belongs to, as in the settings."""
        return CLASS_OF[self.kind]


class Redacted(NamedTuple):
    """A text without what was to leave it, the finds in their order, and how many stand-ins it held before, by kind.

    A stand-in in a text that was never redacted means that a reserved space is in real use; see ``private_blocks``.
    """

    text: str
    findings: tuple[Finding, ...]
    standins: Mapping[str, int]


class _Edit(NamedTuple):
    """A replacement: ``start`` to ``end`` of the text before became ``size`` characters."""

    start: int
    end: int
    size: int


class Redactor:
    """Redacts texts under one configuration and key. Holds no mutable state: safe in threads, plain to send to workers.

    Raises ConfigError when detect-secrets is asked for and missing, InputError for a key of fewer than 16 bytes.
    """

    def __init__(self, config: RedactConfig, key: bytes | RedactionKey) -> None:
        secret = key.secret if isinstance(key, RedactionKey) else key
        if len(secret) < MIN_KEY_BYTES:
            raise InputError(f"a redaction key must have at least {MIN_KEY_BYTES} bytes, not {len(secret)}")
        self.config = config
        self._secret = secret
        self._pseudonyms = Pseudonyms(config, secret)
        self._rules = _rules(config)
        self._wanted = frozenset(kind for kind in CLASS_OF if config.policy(kind) != "keep")
        self._allow = frozenset(value.lower() for value in config.allow)

    def __reduce__(self) -> tuple[Any, ...]:
        return Redactor, (self.config, self._secret)

    def __repr__(self) -> str:
        return "Redactor(...)"

    def redact(self, text: str) -> Redacted:
        """The text with every find replaced as its policy says. ``redact(redact(x).text).text == redact(x).text``."""
        standins: Counter[str] = Counter()
        spans = self._find(text, standins)
        if not spans:
            return Redacted(text, (), standins)
        found = [(span, text[span.start : span.end]) for span in spans]
        result, edits = self._replace(text, spans)
        history = [edits]
        for turn in range(_MAX_PASSES):
            if not self._find(_changed_lines(result, edits), Counter()):
                break
            spans = self._find(result, Counter())
            if not spans:
                break
            if turn == _MAX_PASSES - 1:
                spans = _whole_lines(result, spans)
            found += [(_original(span, history), result[span.start : span.end]) for span in spans]
            result, edits = self._replace(result, spans, whole=turn == _MAX_PASSES - 1)
            history.append(edits)
        return Redacted(result, tuple(self._findings(text, found)), standins)

    def digest(self, kind: str, value: str) -> str:
        """The digest that a finding of this kind and value has, for audits that hold the key."""
        return self._pseudonyms.digest(kind, value)

    def _find(self, text: str, standins: Counter[str]) -> list[Span]:
        """What is to be replaced, in order and without overlaps; counts stand-ins that stand alone."""
        seen = visible(text)
        scan = Scan(seen.text if seen else text)
        spans = []
        left: dict[tuple[str, str], bool] = {}
        for rule in self._rules:
            for span in rule(scan):
                if span.kind not in self._wanted:
                    continue
                key = span.kind, scan.text[span.start : span.end]
                if key not in left:
                    left[key] = self._pseudonyms.known(*key)
                if left[key]:
                    standins[span.kind] += 1
                elif key[1].lower() not in self._allow:
                    spans.append(span)
        settled = _settle(spans)
        return [_place(seen, span) for span in settled] if seen else settled

    def _replace(self, text: str, spans: Iterable[Span], *, whole: bool = False) -> tuple[str, list[_Edit]]:
        pieces, edits, at = [], [], 0
        made: dict[tuple[str, str, bool], str] = {}
        for span in spans:
            new = f"{MARKER_HEAD}{span.kind}]"
            if not whole and self.config.policy(span.kind) == "pseudonymise":
                key = span.kind, text[span.start : span.end], span.grown
                new = made[key] = made.get(key) or self._stand_in(*key[:2], grown=span.grown)
            pieces += [text[at : span.start], new]
            edits.append(_Edit(span.start, span.end, len(new)))
            at = span.end
        return "".join([*pieces, text[at:]]), edits

    def _stand_in(self, kind: str, value: str, *, grown: bool) -> str:
        seen = visible(value)
        plain = seen.text if seen else value
        return self._pseudonyms.secret(plain) if grown else self._pseudonyms.fake(kind, plain)

    def _findings(self, text: str, found: list[tuple[Span, str]]) -> Iterator[Finding]:
        line, at = 1, 0
        digests: dict[tuple[str, str], str] = {}
        for span, value in sorted(found):
            line += text.count("\n", at, span.start)
            at = span.start
            key = span.kind, value
            if key not in digests:
                seen = visible(value)
                digests[key] = self.digest(span.kind, seen.text if seen else value)
            yield Finding(span.kind, line, span.start, span.end, digests[key])


def _rules(config: RedactConfig) -> tuple[Rule, ...]:
    rules: list[tuple[str, Rule]] = [
        ("private_keys", tokens.private_keys),
        ("tokens", tokens.service_tokens),
        ("tokens", tokens.jwts),
        ("tokens", tokens.bearer_tokens),
        ("passwords", commands.url_passwords),
        ("passwords", commands.command_passwords),
        ("passwords", commands.stored_passwords),
        ("tokens passwords", passwords.assignments),
        ("cards", people.card_numbers),
        ("ibans", people.ibans),
        ("mail", people.mail_addresses),
        ("phones", people.phone_numbers),
        ("users", people.user_names),
        ("private_ips", network.private_addresses),
        ("macs", network.mac_addresses),
        ("internal_hosts", network.internal_hosts(config.internal_domains, config.internal_host_names)),
        ("public_ips", network.public_addresses),
        ("public_domains", network.public_domains),
    ]
    if config.detect_secrets:
        from cyberslm.data.redact.second_opinion import detectors

        rules.append(("tokens", detectors()))
    wanted = {name for name in KINDS if getattr(config, name) != "keep"}
    return tuple(rule for names, rule in rules if wanted & set(names.split()))


def _rank(span: Span) -> tuple[int, int, int]:
    return _SEVERITY[CLASS_OF[span.kind]], span.start - span.end, KINDS[CLASS_OF[span.kind]].index(span.kind)


def _settle(spans: list[Span]) -> list[Span]:
    """Overlapping spans as one each, under the kind of the most severe, then longest, then first in its class."""
    settled: list[Span] = []
    best: list[Span] = []
    for span in sorted(spans):
        if settled and span.start < settled[-1].end:
            start, end = settled[-1].start, max(settled[-1].end, span.end)
            best[-1] = min(best[-1], span, key=_rank)
            grown = (start, end) != (best[-1].start, best[-1].end)
            settled[-1] = Span(start, end, best[-1].kind, grown)
        else:
            settled.append(span)
            best.append(span)
    return settled


def _place(seen: Visible, span: Span) -> Span:
    return span._replace(start=seen.place(span.start), end=seen.place(span.end - 1) + 1)


def _changed_lines(text: str, edits: list[_Edit]) -> str:
    """The lines of the new text that hold a replacement, with a line to either side as rules may look there, joined."""
    lines, shift, done = [], 0, 0
    for edit in edits:
        start, end = edit.start + shift, edit.start + shift + edit.size
        shift += edit.size - (edit.end - edit.start)
        first = max(done, text.rfind("\n", 0, max(0, text.rfind("\n", 0, start))) + 1)
        last = text.find("\n", max(end, done))
        last = text.find("\n", last + 1) if last >= 0 else -1
        last = len(text) if last < 0 else last
        if last > done:
            lines.append(text[first:last])
            done = last
    return "\n".join(lines)


def _whole_lines(text: str, spans: list[Span]) -> list[Span]:
    lines = []
    for span in spans:
        end = text.find("\n", span.end)
        lines.append(Span(text.rfind("\n", 0, span.start) + 1, len(text) if end < 0 else end, span.kind))
    return _settle(lines)


def _original(span: Span, history: list[list[_Edit]]) -> Span:
    """Where a span of the newest text lies in the oldest; it grows over the replacements that it touches."""
    start, end = span.start, span.end
    for edits in reversed(history):
        start, end = _before(start, edits, last=False), _before(end, edits, last=True)
    return span._replace(start=start, end=end)


def _before(at: int, edits: list[_Edit], *, last: bool) -> int:
    """The place before some edits of a place after them; inside a replacement, its begin, or with ``last`` its end."""
    shift = 0
    for edit in edits:
        start = edit.start + shift
        if at < start or (at == start and last):
            break
        if at < start + edit.size or (last and at == start + edit.size):
            return edit.end if last else edit.start
        shift += edit.size - (edit.end - edit.start)
    return at - shift
