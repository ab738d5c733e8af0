"""Personal data in a text, and whether it is still there in another.

Knows strings and patterns; nothing of models, files or languages beyond their scripts. What a pattern
finds is what it says and no more: `name-like` takes places and organisations for names, and misses a
first name that stands alone. Annotations, where a text has them, say it better.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

_MONTHS = (
    "jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|"
    "oct(?:ober)?|nov(?:ember)?|dec(?:ember)?"
)
_CAPITAL = r"[A-ZÀ-ÖØ-Þ][a-zß-öø-ÿ]+(?:['’-][A-ZÀ-ÖØ-Þ]?[a-zß-öø-ÿ]+)*"

# Tried in this order: what an earlier pattern has taken, a later one does not see, so that the digits of
# a date are not counted as numbers too.
PATTERNS: dict[str, re.Pattern[str]] = {
    "email": re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"),
    "url": re.compile(r"(?:https?://|www\.)[^\s<>\"]+[^\s<>\".,;:!?)]"),
    "iban": re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b"),
    "ip": re.compile(
        r"(?<![\d.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\d.]*\d)"
    ),
    "date": re.compile(
        rf"\b\d{{4}}-\d{{1,2}}-\d{{1,2}}\b|\b\d{{1,2}}[./]\d{{1,2}}[./](?:\d{{4}}|\d{{2}})\b"
        rf"|\b\d{{1,2}}(?:st|nd|rd|th)? (?:of )?(?:{_MONTHS})\b(?:,? \d{{4}}\b)?"
        rf"|\b(?:{_MONTHS})\.? \d{{1,2}}(?:st|nd|rd|th)?\b(?:,? \d{{4}}\b)?",
        re.IGNORECASE,
    ),
    # Seven digits or more with what people put between them, or a plus in front; two years are no phone.
    "phone": re.compile(
        r"(?<![\w.])(?!(?:1[5-9]|20)\d\d-(?:1[5-9]|20)\d\d\b)"
        r"(?:\+\d[\d ()/.-]{6,15}\d|\(?\d{2,5}\)?(?:[ /-]\d{2,5}){1,4})(?!\w)"
    ),
    "name-like": re.compile(
        rf"(?<=\b(?:Mr|Ms|Dr)\. ){_CAPITAL}(?: {_CAPITAL})*|(?<=\bMrs\. ){_CAPITAL}(?: {_CAPITAL})*"
        rf"|(?<=[a-z,;:] ){_CAPITAL}(?: {_CAPITAL})+"
    ),
    "number": re.compile(r"(?<![\w.,])\d+(?:[.,:]\d+)*(?!\w)"),
}
# A letter or digit of a script whose words spaces keep apart: not Thai, Lao, kana, Han, nor Hangul, whose
# particles follow a name without a space.
_SPACED = re.compile(r"[^\W_\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
KINDS = ("name", "address", *PATTERNS)


@dataclass(frozen=True)
class Item:
    """A piece of personal data as it stands in a text."""

    kind: str
    text: str


def find(text: str) -> list[Item]:
    """Find personal data by pattern, in the order of the text.

    >>> [(i.kind, i.text) for i in find("Call Ann on 3 May 2024, 020 7946 0018 or ann@example.org, room 12.")]
    [('date', '3 May 2024'), ('phone', '020 7946 0018'), ('email', 'ann@example.org'), ('number', '12')]
    """
    found: list[tuple[int, Item]] = []
    for kind, pattern in PATTERNS.items():
        taken = []
        for match in pattern.finditer(text):
            if kind == "phone" and sum(c.isdigit() for c in match[0]) < 7:
                continue
            found.append((match.start(), Item(kind, match[0])))
            taken.append(match.span())
        for start, stop in taken:
            # A letter of no script keeps neighbours apart, and no pattern takes it.
            text = text[:start] + "\0" * (stop - start) + text[stop:]
    return [item for _, item in sorted(found, key=lambda each: each[0])]


def within(items: Iterable[Item], text: str) -> list[Item]:
    """Keep the items that stand in a text: those that were not cut off with its end."""
    return [item for item in items if survives(item.text, text)]


def survives(item: str, text: str) -> bool:
    """Whether an item stands in a text, whatever case, accents and white space around punctuation.

    A whole item: 12 does not stand in 512, nor Ann in Anna.

    >>> survives("Ana.Ruíz@example.org", "write to ana. ruiz @ example. org today")
    True
    >>> survives("12", "room 512"), survives("12", "room 12."), survives("山田", "山 田 さ ん")
    (False, True, True)
    """
    return _matcher(fold(item)).search(fold(text)) is not None


def fold(text: str) -> str:
    r"""Fold case, accents, widths and white space.

    >>> fold("  Žofie\nMÜLLER  ")
    'zofie muller'
    """
    apart = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    plain = "".join(c for c in apart if unicodedata.category(c) != "Mn")
    return " ".join(unicodedata.normalize("NFC", plain).split())


@functools.lru_cache(maxsize=4096)
def _matcher(item: str) -> re.Pattern[str]:
    """Build the pattern of a folded item: spaces may come and go but between letters of spaced words."""
    pattern, gap, previous = "", "", ""
    for here in item:
        if here == " ":
            gap = r"\s+"
            continue
        joined = _SPACED.match(previous) and _SPACED.match(here)
        pattern += (gap if joined else r"\s*" if previous else "") + re.escape(here)
        gap, previous = "", here
    start = rf"(?<!{_SPACED.pattern})" if _SPACED.match(item[:1]) else ""
    end = rf"(?!{_SPACED.pattern})" if _SPACED.match(item[-1:]) else ""
    start += r"(?<!\d[.,])" if item[:1].isdecimal() else ""
    end += r"(?![.,]\d)" if item[-1:].isdecimal() else ""
    return re.compile(start + pattern + end)
