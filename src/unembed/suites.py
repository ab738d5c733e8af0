"""Texts to measure on, and where they come from: files, parallel texts, the built-in sentences.

Knows file formats, languages and annotations of personal data. Must not know tokens, vectors or models.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from unembed.errors import UnembedError, unknown_name
from unembed.personal import Item, find
from unembed.sources import LANGUAGES, read_objects, read_texts, text_field

# Written for this project; every person, number and address in them is invented.
BUILTIN = ("english", "parallel")


@dataclass(frozen=True)
class Sample:
    """One text of a suite."""

    text: str
    language: str | None = None
    personal: tuple[Item, ...] | None = None  # annotated; None: to be found by pattern

    def items(self) -> Sequence[Item]:
        """The personal data in the text, as annotated or else by pattern."""
        return find(self.text) if self.personal is None else self.personal

    @property
    def key(self) -> str:
        """A short name for this text in this language, the same in every run."""
        return hashlib.sha256(f"{self.language or ''}\0{self.text}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Suite:
    """Texts that are measured together under one name."""

    name: str
    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        """Refuse a suite with nothing in it."""
        if not self.samples:
            raise UnembedError("there is no text to evaluate; give at least one.")

    @property
    def languages(self) -> list[str]:
        """The languages, in the order of their first text; empty if none is known."""
        return list(dict.fromkeys(s.language for s in self.samples if s.language))

    @property
    def digest(self) -> str:
        """A hash of all texts, languages and annotations, in order."""
        rows = [
            [s.text, s.language, s.personal and [[i.kind, i.text] for i in s.personal]] for s in self.samples
        ]
        return hashlib.sha256(json.dumps(rows, ensure_ascii=False).encode()).hexdigest()


def suite_of(texts: Iterable[str], *, name: str = "texts", language: str | None = None) -> Suite:
    """Make a suite of plain texts."""
    if isinstance(texts, str):
        raise UnembedError("expected a list of texts, not one string; put it in brackets.")
    return Suite(name, tuple(Sample(text, language) for text in texts))


def read_suites(
    paths: Sequence[str | Path],
    *,
    field: str = "text",
    language_field: str = "language",
    languages: Sequence[str] = (),
    limit: int | None = None,
) -> list[Suite]:
    """Read one suite from each file, named after it.

    Args:
        paths: .txt (a text a line), .jsonl, .parquet; - for standard input.
        field: Field of JSON lines, or column of Parquet, that holds the text.
        language_field: Field of JSON lines that holds the text's language, where there is one.
        languages: Keep these only; all by default.
        limit: Take the first so many texts of each suite, of each of its languages.

    JSON lines that have no `field` but texts under the names of languages, {"en": "...", "de": "..."},
    are parallel texts: each is read in every language.
    """
    check_limit(limit)
    names = [str(path) for path in paths]
    stems = ["stdin" if name == "-" else Path(name).name.partition(".")[0] or name for name in names]
    counts = Counter(stems)
    suites = []
    for name, stem in zip(names, stems, strict=True):
        if ".jsonl" in Path(name).name.lower():
            samples = _read_jsonl(name, field=field, language_field=language_field)
            chosen = _choose(samples, languages, limit)
        elif languages:
            raise UnembedError(f"{name} says no language of its texts; write them as JSON lines to choose.")
        else:
            chosen = [Sample(text) for text in islice(read_texts(name, field=field), limit)]
        if not chosen:
            raise UnembedError(f"{name} has no text in {', '.join(languages) or 'it'}; check the file.")
        suites.append(Suite(stem if counts[stem] == 1 else name, tuple(chosen)))
    return suites


def builtin_suite(name: str, *, languages: Sequence[str] = (), limit: int | None = None) -> Suite:
    """Load sentences that come with the package: `english`, or `parallel` in ten languages."""
    if name not in BUILTIN:
        raise unknown_name("built-in suite", name, BUILTIN)
    check_limit(limit)
    file = resources.files("unembed") / "data" / f"{name}.jsonl"
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    samples = (sample for record in records for sample in _samples(record, f"built-in {name}"))
    chosen = _choose(samples, languages, limit)
    if not chosen:
        raise UnembedError(f"the built-in suite {name!r} has no text in {', '.join(languages)}.")
    return Suite(name, tuple(chosen))


def check_limit(limit: int | None) -> None:
    """Refuse to take no text."""
    if limit is not None and limit < 1:
        raise UnembedError(f"limit must be at least 1, not {limit}; leave it out to take every text.")


def _read_jsonl(name: str, *, field: str, language_field: str) -> Iterator[Sample]:
    """Read the samples of a file of JSON lines."""
    # Missing files and unknown endings are said by the reader of plain texts, in the same words.
    read_texts(name, field=field)
    for place, record in read_objects(name):
        yield from _samples(record, place, field=field, language_field=language_field)


def _samples(
    record: dict[str, Any], place: str, *, field: str = "text", language_field: str = "language"
) -> Iterator[Sample]:
    """Take the text of a JSON object, or its texts in every language."""
    spoken = [key for key in record if key in LANGUAGES and isinstance(record[key], str)]
    if field in record or len(spoken) < 2:
        text = text_field(record, field, place).strip()
        language = record.get(language_field)
        if language is not None and not isinstance(language, str):
            raise UnembedError(f"{place}: field {language_field!r} is not a string; choose another field.")
        found = [(text, language, record.get("personal"))]
    else:
        noted = record.get("personal")
        noted = noted if isinstance(noted, dict) else {}
        found = [(text_field(record, key, place).strip(), key, noted.get(key)) for key in spoken]
    for text, language, items in found:
        if text:
            yield Sample(text, language or None, _annotations(items, place))


def _annotations(items: Any, place: str) -> tuple[Item, ...] | None:
    """Read a list of {"kind": ..., "text": ...}."""
    if items is None:
        return None
    try:
        return tuple(Item(str(item["kind"]), str(item["text"])) for item in items)
    except (TypeError, KeyError) as error:
        raise UnembedError(
            f'{place}: field \'personal\' must be a list of {{"kind": "name", "text": "..."}}.'
        ) from error


def _choose(samples: Iterable[Sample], languages: Sequence[str], limit: int | None) -> list[Sample]:
    """Keep the languages that are wanted, and of each the first texts; language after language."""
    by_language: dict[str | None, list[Sample]] = {}
    for sample in samples:
        if not languages or sample.language in languages:
            kept = by_language.setdefault(sample.language, [])
            if limit is None or len(kept) < limit:
                kept.append(sample)
    return [sample for kept in by_language.values() for sample in kept]
