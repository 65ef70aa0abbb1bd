"""What names a person: mail addresses, user names in paths, phone, card and bank account numbers.

Numbers are told from other numbers by what their issuers fixed: card prefixes and the Luhn sum (ISO/IEC 7812), IBAN
lengths and the remainder modulo 97 (ISO 13616), country codes and layouts of phone numbers (E.164, NANP). Documentation
names (example.com, .example), accounts that every system has (ubuntu, Public) and fictional 555-01xx numbers are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from cyberslm.data.redact.pseudonyms import luhn, refang
from cyberslm.data.redact.scan import Scan, Span, words

_LOCAL = re.compile(r"[\w.%+'-]{0,63}\w")
_MAIL_HOST = re.compile(r"(?:@|\[@\]|\(@\)|\[at\]|\(at\))(?P<host>[\w-]{1,63}(?:(?:\.|\[\.\]|\(\.\))[\w-]{1,63}){1,8})")
# A password in a URL, not the local part of an address.
_USER_INFO = re.compile(r"://[^\s/@:]{0,80}:[^\s/@]{0,80}$")
_FILE_ENDINGS = words("png jpg jpeg gif svg webp js ts css html json yaml yml toml xml py so dll exe whl gz zip md txt")
_DOCUMENTATION = re.compile(r"(?:.*\.)?(?:example\.(?:com|org|net|edu)|example|test|invalid|localhost)")
_PROTOCOL_HOSTS = frozenset({"openssh.com", "libssh.org"})
_IPV4 = re.compile(r"(?:[0-9]{1,3}\.){3}[0-9]{1,3}")

_UNIX_HOME = re.compile(r"(?:/home/|/Users/)(?P<name>[\w.$-]{1,64})")
_LINK = re.compile(r"(?:href|src|action|url)=[\"']?$", re.I)
_WINDOWS_HOME = re.compile(
    r"(?:\\{1,4}|/)(?:users|documents and settings)(?:\\{1,4}|/)"
    r"(?P<name>[^\\/:*?\"<>|\s;,'()`{}%$\[\]]{1,64}(?:[ ][^\\/:*?\"<>|\s;,'()`]{1,40}){0,2}(?=[\\/])|[\w.-]{1,64})",
    re.I,
)
_MOUNTED = re.compile(r"(?:^|[\s\"'=:(,;>])/(?:mnt/|cygdrive/|media/)?[a-z]$", re.I)
_ACCOUNTS = words(
    "shared public default defaultuser0 administrator admin root user users username ubuntu debian centos fedora "
    "vagrant runner ec2-user azureuser opc pi node app git jenkins circleci travis gitpod vscode codespace linuxbrew "
    "www www-data nobody guest svc-example you me name yourname youruser your-user your_user your-username my-user "
    "myuser someuser example all all~1 target victim attacker kali docker containeruser containeradministrator "
    "networkservice localservice"
)

# A first character that a scan can look for, then what must not stand before it: that keeps the search fast.
_CARD = re.compile(
    r"[2-6](?<![\w.].)(?<!\d[- ].)"
    r"(?:\d{12,18}|\d{3}(?P<s>[ -])\d{4}(?P=s)\d{4}(?P=s)\d{1,7}|\d{3}(?P<t>[ -])\d{6}(?P=t)\d{4,5})"
    r"(?![\w-]|\.\d| \d{3,4}\b)",
    re.A,
)
_CARD_PREFIX = re.compile(
    r"4(?:\d{12}|\d{15}|\d{18})|(?:5[1-5]\d\d|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12}|3[47]\d{13}"
    r"|(?:6011|64[4-9]\d|65\d\d|35(?:2[89]|[3-8]\d))\d{12}|3(?:0[0-5]|[68]\d)\d{11}"
)
_IBAN = re.compile(r"[A-Z](?<![A-Za-z0-9].)[A-Z][0-9]{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?![A-Za-z0-9])")
_IBAN_LENGTHS = {
    "AD": 24,
    "AE": 23,
    "AL": 28,
    "AT": 20,
    "BA": 20,
    "BE": 16,
    "BG": 22,
    "CH": 21,
    "CY": 28,
    "CZ": 24,
    "DE": 22,
    "DK": 18,
    "EE": 20,
    "ES": 24,
    "FI": 18,
    "FR": 27,
    "GB": 22,
    "GE": 22,
    "GI": 23,
    "GR": 27,
    "HR": 21,
    "HU": 28,
    "IE": 22,
    "IL": 23,
    "IS": 26,
    "IT": 27,
    "KW": 30,
    "LB": 28,
    "LI": 21,
    "LT": 20,
    "LU": 20,
    "LV": 21,
    "MC": 27,
    "MD": 24,
    "ME": 22,
    "MK": 19,
    "MT": 31,
    "NL": 18,
    "NO": 15,
    "PK": 24,
    "PL": 28,
    "PT": 25,
    "QA": 29,
    "RO": 24,
    "RS": 22,
    "SA": 24,
    "SE": 24,
    "SI": 19,
    "SK": 24,
    "SM": 27,
    "TN": 24,
    "TR": 26,
    "UA": 29,
    "VA": 22,
    "XK": 20,
    "BR": 29,
    "CR": 22,
    "DO": 28,
    "EG": 29,
    "GL": 18,
    "FO": 18,
    "GT": 28,
    "KZ": 20,
    "MU": 30,
    "AZ": 28,
    "BH": 22,
    "JO": 30,
}

_PLUS_PHONE = re.compile(
    r"(?<![\w+/.%-])(?!\+\d+\.\d+(?![\d.]))\+[1-9]\d{0,2}(?:[ .-]?\(\d{1,5}\))?(?:[ ./-]?\d){6,13}(?![\w+/=]|[.-]\d)",
    re.A,
)
# North America with and without parentheses, then the trunk digit 0 of other countries.
_NATIONAL = re.compile(
    r"[(02-9](?<![\w.+/-].)(?:"
    r"(?<=\()[2-9]\d\d\) ?(?P<a>[2-9]\d\d)[ .-](?P<b>\d{4})(?![\w-]|\.\d)"
    r"|(?<=[2-9])\d\d(?<!\d ...)(?P<s>[.-])(?P<c>[2-9]\d\d)(?P=s)(?P<d>\d{4})(?![\w-]|\.\d)"
    r"|(?<=[(0])(?<![:].)(?<!\d .)"
    r"(?:(?:(?<=\()0[1-9]\d{1,3}\) ?|(?<=0)[1-9]\d{1,3}[ /-])\d{3,8}(?:[ -]\d{2,4}){0,2}|(?<=0)[1-9](?:[ .]\d\d){4})"
    r"(?![\w/-]|[.:]\d))",
    re.A,
)
_KEYED_PHONE = re.compile(
    r"(?:tel(?:ephone|efon)?|phone|mobile|cell|fax|sms|whatsapp)(?:[_ ]?(?:number|no|nr|num))?\.?[\"']?"
    r"[ \t]{0,3}[=:>]{0,2}[ \t]{0,3}[\"']?"
    r"(?P<value>[+(]?\d(?:[ .()/-]{0,2}\d){6,14})(?![\w-]|\.\d)",
    re.I | re.A,
)


def mail_addresses(scan: Scan) -> Iterator[Span]:
    """Whole addresses, defanged ones too; not those of documentation, of git servers and of protocol names."""
    text, done = scan.text, 0
    for at in sorted(scan.anchors(("@", "[at]", "(at)"))):
        at -= text[at - 1 : at] in ("[", "(") and scan.low.startswith("@", at)
        found = _MAIL_HOST.match(text, at)
        start = scan.back(at, _LOCAL, 64)
        if not found or at < done or start == at:
            continue
        host = refang(found["host"]).lower().rstrip("-_")
        ending = host.rpartition(".")[2]
        local = text[start:at].lower()
        if _USER_INFO.search(text, max(0, start - 160), start):
            continue
        if not (ending.isalpha() and 2 <= len(ending) <= 24 or ending.startswith("xn--") or _IPV4.fullmatch(host)):
            continue
        if ending in _FILE_ENDINGS or _DOCUMENTATION.fullmatch(host) or host in _PROTOCOL_HOSTS or local == "git":
            continue
        start += len(text[start:at]) - len(text[start:at].lstrip(".%+'-"))
        start += start > 1 and text[start - 1] == "\\" and text[start] in "nrt"
        done = found.end() - (len(found["host"]) - len(found["host"].rstrip("-_")))
        yield Span(start, done, "mail")


def user_names(scan: Scan) -> Iterator[Span]:
    """The folder below /home, /Users and C:\\Users, unless it is an account that every system has."""
    text = scan.text
    for at in scan.anchors(("/home/",)):
        # A web page's /home/ follows a host name; a root's follows a space, a quote, a colon or file://.
        if (
            not text[at - 1 : at].isalnum()
            and not _LINK.search(text, max(0, at - 10), at)
            and (found := _UNIX_HOME.match(text, at))
        ):
            yield from _user(found)
    for at in scan.anchors(("/users/", "\\users\\", "\\documents and settings\\")):
        start = at
        while start and text[start - 1] == "\\" and text[at] == "\\" and at - start < 3:
            start -= 1
        before = text[max(0, start - 20) : start]
        windows = text[at] == "\\" or before.endswith((":", "$")) or bool(_MOUNTED.search(before))
        mac = text.startswith("/Users/", at) and not before[-1:].isalnum()
        found = (_WINDOWS_HOME if windows else _UNIX_HOME).match(text, at) if windows or mac else None
        if found:
            yield from _user(found)


def _user(found: re.Match[str]) -> Iterator[Span]:
    name = found["name"].rstrip(".-")
    if name and name.lower() not in _ACCOUNTS and not name.startswith("$") and any(map(str.isalpha, name)):
        yield Span(found.start("name"), found.start("name") + len(name), "user")


def card_numbers(scan: Scan) -> Iterator[Span]:
    """Numbers with a card's prefix and length whose Luhn sum is right."""
    for found in _CARD.finditer(scan.text):
        digits = found[0].replace(" ", "").replace("-", "")
        if _CARD_PREFIX.fullmatch(digits) and luhn(digits) == 0 and len(set(digits)) > 2:
            yield Span(found.start(), found.end(), "card")


def ibans(scan: Scan) -> Iterator[Span]:
    """Bank account numbers of their country's length whose remainder modulo 97 is 1; blanks between groups allowed."""
    for found in _IBAN.finditer(scan.text):
        length = _IBAN_LENGTHS.get(found[0][:2])
        if length is None:
            continue
        end = _nth(found[0], length)
        plain = found[0][:end].replace(" ", "")
        if end and len(plain) == length and not found[0][end : end + 1].isalnum():
            number = int("".join(str(int(character, 36)) for character in plain[4:] + plain[:4]))
            if number % 97 == 1 and 2 <= int(plain[2:4]) <= 98:
                yield Span(found.start(), found.start() + end, "iban")


def _nth(text: str, count: int) -> int:
    """Where the ``count``-th character that is no blank ends; 0 when there are fewer."""
    for at, character in enumerate(text, 1):
        count -= character != " "
        if not count:
            return at
    return 0


def phone_numbers(scan: Scan) -> Iterator[Span]:
    """International numbers, North American and trunk (0...) layouts, and digits after a word such as phone."""
    text = scan.text
    for at in scan.anchors(("+",)):
        found = _PLUS_PHONE.match(text, at)
        if found and not _is_diff_line(text, found):
            yield Span(found.start(), found.end(), "phone")
    for found in _NATIONAL.finditer(text):
        exchange, line = found["a"] or found["c"], found["b"] or found["d"]
        fictional = exchange == "555" and line.startswith("01")
        if not fictional and (exchange or 9 <= sum(map(str.isdigit, found[0])) <= 12):
            yield Span(found.start(), found.end(), "phone")
    for at in scan.anchors(("tel", "phone", "mobile", "cell", "fax", "sms", "whatsapp")):
        if found := _KEYED_PHONE.match(text, at):
            yield Span(found.start("value"), found.end("value"), "phone")


def _is_diff_line(text: str, found: re.Match[str]) -> bool:
    """A plus at the start of a line among lines of a diff, before digits without a break."""
    at = found.start()
    if not found[0][1:].isdigit() or text[at - 1 : at] not in ("", "\n"):
        return False
    above = text.rfind("\n", 0, max(0, at - 1)) + 1
    return text[above : above + 1] in ("+", "-", "@") and above < at
