"""What may have been put into a text to deceive a reader or the model: counted and shown, left as it is.

Direction controls and invisible characters (Boucher and Anderson, "Trojan Source", 2021; Unicode TR 36 and TR 39), tag
characters and strings of variation selectors that spell hidden text, words of mixed alphabets, and sentences that give
orders to a model. Joiners between letters of scripts that need them, emoji sequences and flags are ordinary text.

Orders are looked for in a copy without invisible characters, in NFKC and small letters, so that hiding does not help;
patterns have bounded gaps and are tried only where one of their words occurs.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

from cyberslm.data.clean.config import Tripwire, TripwiresConfig
from cyberslm.data.clean.entry import Entry, Note, Outcome

_BIDI = re.compile("[\u202a-\u202e\u2066-\u2069]")
_LETTER = "A-Za-z0-9\u00c0-\u024f\u0370-\u03ff\u0400-\u052f"
_INVISIBLE = re.compile(
    f"[\u200b\u2060-\u2064\u180e\u115f\u1160\u3164\uffa0\u00ad]|(?<=[\\s\\S])\ufeff|(?<=[{_LETTER}])[\u200c\u200d](?=[{_LETTER}])"
)
_TAGS = re.compile(
    "(?<!\U0001f3f4)(?<![\U000e0020-\U000e007e])[\U000e0000-\U000e007f]+|[\ufe00-\ufe0f\U000e0100-\U000e01ef]{3,}"
)
_REMOVED = re.compile(
    "[\u200b-\u200f\u2060-\u2064\u202a-\u202e\u2066-\u2069\u180e\u115f\u1160\u3164\uffa0\u00ad\ufeff"
    "\ufe00-\ufe0f\U000e0000-\U000e01ef]"
)

_LATIN = "A-Za-z\u00c0-\u024f"
_CYRILLIC = "\u0400-\u052f"
_STYLED = "\uff21-\uff3a\uff41-\uff5a\U0001d400-\U0001d7ff"
# Greek letters that look like Latin ones; the others stand beside Latin letters in units and formulas.
_GREEK = (
    "\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7"
    "\u03bf\u03b9\u03ba\u03bd\u03c1\u03c4\u03c5\u03c7\u03f2\u03f3"
)
_OTHERS = f"{_CYRILLIC}{_GREEK}{_STYLED}\u0561-\u0587\u13a0-\u13f5"
_WORD = f"[{_LATIN}{_OTHERS}]"
_MIXED = re.compile(f"(?<!{_WORD})(?:[{_LATIN}]+[{_OTHERS}]|[{_OTHERS}]+[{_LATIN}]){_WORD}*")
_SUSPECT = re.compile(f"[{_OTHERS}]")

# (words of which one must occur, pattern); S is white space, G and F up to four and up to two words between.
_S = r"[\s*_`>#'\"-]{1,8}"
_G = rf"(?:{_S}[^\W\d]{{1,15}}){{0,4}}{_S}"
_F = rf"(?:{_S}[^\W\d]{{1,15}}){{0,2}}{_S}"
_ORDERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("ignor", "disregard", "forget", "overrid", "bypass"),
        rf"\b(?:ignor(?:e|ing)|disregard|forget|overrid(?:e|ing)|bypass){_F}"
        rf"(?:previous|prior|above|earlier|preceding|foregoing|original|system|your|all|any|these|those|everything)"
        rf"{_F}(?:instructions?|prompts?|directives?|guidelines|directions)\b",
    ),
    (
        ("reveal", "print", "repeat", "output", "show", "leak"),
        rf"\b(?:reveal|print|repeat|output|show|leak){_S}(?:me{_S})?(?:your|the){_S}(?:hidden{_S}|full{_S}|initial{_S})?"
        rf"(?:system{_S}(?:prompt|message)|initial{_S}instructions)\b",
    ),
    (
        ("you are now", "you must now act", "from now on you"),
        rf"\b(?:you{_S}are{_S}now|from{_S}now{_S}on{_S}you){_G}"
        r"(?:assistant|model|ai|chatbot|bot|dan|jailbroken|unrestricted|unfiltered|agent)\b",
    ),
    (
        ("language model", "llm", "assistant", "chatbot", " ai "),
        rf"\b(?:if{_S}you{_S}are|note{_S}to|attention|instructions?{_S}(?:to|for)){_S}(?:an?{_S}|any{_S}|the{_S}|all{_S})?"
        rf"(?:ai|llms?|large{_S}language{_S}models?|language{_S}models?|ai{_S}assistants?|chatbots?|ai{_S}models?|ai{_S}agents?)\b",
    ),
    (
        ("do not tell", "don't tell", "without telling", "do not mention", "do not inform"),
        rf"\b(?:do{_S}not|don.t|without){_S}(?:tell(?:ing)?|mention(?:ing)?|inform(?:ing)?){_S}(?:this{_S}to{_S})?the{_S}user\b",
    ),
    (
        ("<|", "[inst]", "<<sys>>", "[system]"),
        r"<\|(?:im_start|im_end|system|user|assistant|start_header_id|eot_id|endoftext|begin_of_text)\|>|\[/?inst\]|<</?sys>>"
        r"|\[system\][(\s:]",
    ),
    (("anweisung", "vorgaben"), rf"\b(?:ignorier\w{{0,3}}|vergiss|missachte\w?|umgehe){_G}(?:anweisungen|vorgaben)\b"),
    (
        ("instructions", "consignes"),
        rf"\b(?:ignor(?:e|ez|er)|oublie[zr]?|n.gligez){_G}(?:instructions|consignes|directives)\b",
    ),
    (
        ("instrucciones", "instru\u00e7\u00f5es", "instrucoes", "istruzioni"),
        rf"\b(?:ignor[aeo]\w{{0,3}}|olvid[ae]\w{{0,2}}|esque[c\u00e7]\w{{1,2}}|desconsidere|dimentica\w{{0,2}})"
        rf"{_G}(?:instrucciones|instru\u00e7\u00f5es|instrucoes|istruzioni)\b",
    ),
    (
        ("\u0438\u043d\u0441\u0442\u0440\u0443\u043a\u0446\u0438", "\u0443\u043a\u0430\u0437\u0430\u043d\u0438"),
        "\\b(?:\u0438\u0433\u043d\u043e\u0440\u0438\u0440\u0443\\w{1,3}|\u0437\u0430\u0431\u0443\u0434\\w{1,3})"
        f"{_G}(?:\u0438\u043d\u0441\u0442\u0440\u0443\u043a\u0446\u0438\\w|\u0443\u043a\u0430\u0437\u0430\u043d\u0438\\w)\\b",
    ),
    (
        ("\u6307\u4ee4", "\u6307\u793a", "\u63d0\u793a"),
        "(?:\u5ffd\u7565|\u65e0\u89c6|\u7121\u8996|\u5ffd\u8996|\u5fd8\u8bb0)[^\\s\u3002.]{0,12}(?:\u6307\u4ee4|\u6307\u793a|\u63d0\u793a\u8bcd?)"
        "|(?:\u6307\u793a|\u547d\u4ee4)[^\\s\u3002.]{0,6}\u7121\u8996",
    ),
)
_COMPILED = tuple((words, re.compile(pattern)) for words, pattern in _ORDERS)


@dataclass(frozen=True)
class TripwireStep:
    config: TripwiresConfig

    def apply(self, entry: Entry) -> Outcome:
        notes = tuple(_notes(entry.text))
        dropped = next((note.kind for note in notes if note.kind in self.config.drop), None)
        return Outcome(entry.text, dropped, notes)


def _notes(text: str) -> Iterator[Note]:
    if not text.isascii():
        yield from _marks("bidi control", _BIDI, text)
        yield from _marks("invisible character", _INVISIBLE, text)
        yield from _marks("hidden tag text", _TAGS, text)
        if _SUSPECT.search(text):
            yield from _marks("mixed alphabets", _MIXED, text)
    yield from _orders(text)


def _marks(kind: Tripwire, pattern: re.Pattern[str], text: str) -> Iterator[Note]:
    first, count = None, 0
    for match in pattern.finditer(text):
        first = first or match
        count += 1
    if first is not None:
        line = text.count("\n", 0, first.start()) + 1
        yield Note(kind, line, count, detail=_code_points(first[0]))


def _code_points(found: str) -> str:
    """What was found, by code points that are not plain Latin letters: an example never quotes a text."""
    strange = [f"U+{ord(character):04X}" for character in found if not character.isascii()]
    return " ".join(strange[:4]) + (" ..." if len(strange) > 4 else "")


def _orders(text: str) -> Iterator[Note]:
    plain = text.lower() if text.isascii() else unicodedata.normalize("NFKC", _REMOVED.sub("", text)).lower()
    starts = sorted(
        match.start()
        for words, pattern in _COMPILED
        if any(word in plain for word in words)
        for match in pattern.finditer(plain)
    )
    if starts:
        yield Note("instruction to a model", plain.count("\n", 0, starts[0]) + 1, len(starts))
