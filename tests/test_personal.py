"""Personal data: what the patterns find, and when an item counts as still there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unembed.personal import KINDS, Item, find, fold, survives, within


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("write to ann.o-neil+x@mail.example.org.", [("email", "ann.o-neil+x@mail.example.org")]),
        ("see https://example.org/a?b=1, or www.example.org.", [
            ("url", "https://example.org/a?b=1"), ("url", "www.example.org")]),
        ("from 192.0.2.17 to 256.1.1.1", [("ip", "192.0.2.17"), ("number", "256.1.1.1")]),
        ("version 1.2.3.4.5 of it", [("number", "1.2.3.4.5")]),
        ("pay DE89 3704 0044 0532 0130 00 now", [("iban", "DE89 3704 0044 0532 0130 00")]),
        ("GB29NWBK60161331926819", [("iban", "GB29NWBK60161331926819")]),
        ("born on 4 May 1987", [("date", "4 May 1987")]),
        ("on the 3rd of June, or Sept. 8", [("date", "3rd of June"), ("date", "Sept. 8")]),
        ("2024-02-29 and 03/04/21 and 1.2.2020", [
            ("date", "2024-02-29"), ("date", "03/04/21"), ("date", "1.2.2020")]),
        ("ring (212) 555-0147 or +44 20 7946 0018", [
            ("phone", "(212) 555-0147"), ("phone", "+44 20 7946 0018")]),
        ("between 2002-2007 there were 1,250.50 in 12 rooms", [
            ("number", "2002"), ("number", "2007"), ("number", "1,250.50"), ("number", "12")]),
        ("the talk by Anna Keller and Dr. Osei", [("name-like", "Anna Keller"), ("name-like", "Osei")]),
        ("Anna went home with x2 and b12", []),
        ("", []),
    ],
)  # fmt: skip
def test_patterns(text: str, expected: list[tuple[str, str]]) -> None:
    assert [(item.kind, item.text) for item in find(text)] == expected


@given(st.text(max_size=80))
def test_what_is_found_stands_in_the_text(text: str) -> None:
    for item in find(text):
        assert item.kind in KINDS
        assert item.text in text
        assert survives(item.text, text)


@pytest.mark.parametrize(
    ("item", "text", "expected"),
    [
        ("Anna Keller", "it was anna  keller, she said", True),
        ("Anna Keller", "annakeller", False),
        ("Anna Keller", "keller anna", False),
        ("Ann", "anna", False),
        ("Ann", "ann's", True),
        ("José Müller", "jose muller", True),
        ("12", "512", False),
        ("12", "12.5", False),
        ("12", "it is 12.", True),
        ("12", "12th", False),
        ("4,500", "4, 500 bicycles", True),
        ("4,500", "4500 bicycles", False),
        ("14 May 1987", "14 may 1987", True),
        ("14 May 1987", "may 14 1987", False),
        ("p.norin@example.org", "p. norin @ example. org", True),
        ("(212) 555-0178", "( 212 ) 555 - 0178", True),
        ("+1 212 555 0164", "+ 1 212 555 0164", True),
        ("+1 212 555 0164", "+ 1 212 555 0165", False),
        ("安娜·凯勒", "安 娜 · 凯 勒 于", True),
        ("2014", "于2014年", True),
        ("마리아 산토스", "마리아 산토스는", True),
        ("田辺由紀", "田辺由美", False),
        ("عمر حداد", "اتصل ب عمر حداد على", True),
        ("Straße", "STRASSE", True),
        ("x", "", False),
    ],
)
def test_when_an_item_survives(item: str, text: str, expected: bool) -> None:
    assert survives(item, text) is expected


@given(st.text(max_size=30))
def test_folding_twice_is_folding_once(text: str) -> None:
    assert fold(fold(text)) == fold(text)


def test_items_that_were_cut_off() -> None:
    items = [Item("name", "Anna"), Item("number", "12")]
    assert within(items, "Anna went") == items[:1]
