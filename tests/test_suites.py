"""Suites: files in every shape, and the sentences that come with the package."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from unembed.errors import UnembedError
from unembed.personal import KINDS, Item, survives
from unembed.sources import LANGUAGES
from unembed.suites import BUILTIN, Sample, Suite, builtin_suite, read_suites, suite_of

DATA = Path(__file__).parent.parent / "src" / "unembed" / "data"


def write(path: Path, *records: Any) -> str:
    path.write_text(
        "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8"
    )
    return str(path)


def test_text_files_are_suites_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\nthree\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("four\n", encoding="utf-8")
    first, second = read_suites([tmp_path / "a.txt", tmp_path / "b.txt"], limit=2)
    assert (first.name, [s.text for s in first.samples]) == ("a", ["one", "two"])
    assert (second.name, second.languages) == ("b", [])
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("five\n", encoding="utf-8")
    names = [s.name for s in read_suites([tmp_path / "a.txt", tmp_path / "sub" / "a.txt"])]
    assert names == [str(tmp_path / "a.txt"), str(tmp_path / "sub" / "a.txt")]


def test_json_lines_with_languages(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mixed.jsonl",
        {"body": "eins", "tongue": "de"},
        {"body": "one", "tongue": "en"},
        {"body": "zwei", "tongue": "de"},
        {"body": "two", "tongue": "en", "personal": [{"kind": "name", "text": "two"}]},
    )
    (suite,) = read_suites([path], field="body", language_field="tongue")
    assert [(s.language, s.text) for s in suite.samples] == [
        ("de", "eins"), ("de", "zwei"), ("en", "one"), ("en", "two")
    ]  # fmt: skip
    assert suite.samples[3].items() == (Item("name", "two"),)
    (suite,) = read_suites([path], field="body", language_field="tongue", limit=1)
    assert [s.text for s in suite.samples] == ["eins", "one"]
    (suite,) = read_suites([path], field="body", language_field="tongue", languages=["en"])
    assert suite.languages == ["en"]
    (suite,) = read_suites([path], field="body")
    assert suite.languages == [] and len(suite.samples) == 4


def test_parallel_texts(tmp_path: Path) -> None:
    noted = {"de": [{"kind": "number", "text": "zwei"}]}
    path = write(
        tmp_path / "parallel.jsonl",
        {"id": 7, "en": "one", "zh": "一", "de": "eins"},
        {"id": 8, "en": "two", "zh": "二", "de": "zwei", "personal": noted},
    )
    (suite,) = read_suites([path])
    assert [(s.language, s.text) for s in suite.samples] == [
        ("en", "one"), ("en", "two"), ("zh", "一"), ("zh", "二"), ("de", "eins"), ("de", "zwei")
    ]  # fmt: skip
    assert suite.samples[-1].personal == (Item("number", "zwei"),)
    assert suite.samples[0].personal is None
    (suite,) = read_suites([path], languages=["de", "zh"], limit=1)
    assert [s.text for s in suite.samples] == ["一", "eins"]


@pytest.mark.parametrize(
    ("records", "options", "said"),
    [
        ([{"text": "a"}], {"field": "body"}, "has no field 'body'; it has text"),
        ([{"en": "a"}], {}, "has no field 'text'; it has en"),
        ([{"text": "a", "language": 3}], {}, "field 'language' is not a string"),
        ([{"text": "a", "language": "en"}], {"languages": ["de"]}, "no text in de"),
        ([{"text": "a", "personal": "Ann"}], {}, "'personal' must be a list"),
        ([{"text": "a"}], {"limit": 0}, "limit must be at least 1"),
        ([["a"]], {}, "not a JSON object"),
    ],
)
def test_bad_json_lines(tmp_path: Path, records: list[Any], options: dict[str, Any], said: str) -> None:
    path = write(tmp_path / "bad.jsonl", *records)
    with pytest.raises(UnembedError, match=re.escape(said)):
        read_suites([path], **options)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(UnembedError, match="there is no file"):
        read_suites([tmp_path / "none.jsonl"])
    (tmp_path / "a.txt").write_text("one\n", encoding="utf-8")
    with pytest.raises(UnembedError, match="says no language"):
        read_suites([tmp_path / "a.txt"], languages=["en"])
    with pytest.raises(UnembedError, match="did you mean 'english'"):
        builtin_suite("inglish")
    with pytest.raises(UnembedError, match="no text in xx"):
        builtin_suite("english", languages=["xx"])
    with pytest.raises(UnembedError, match="not one string"):
        suite_of("one")


def test_keys_and_digests_tell_texts_apart() -> None:
    assert Sample("one").key == Sample("one").key != Sample("two").key
    assert Sample("one", "en").key != Sample("one", "de").key
    base = Suite("a", (Sample("one"), Sample("two")))
    assert base.digest == Suite("b", base.samples).digest
    assert base.digest != Suite("a", (Sample("two"), Sample("one"))).digest
    assert base.digest != Suite("a", (Sample("one"), Sample("two", "en"))).digest
    assert base.digest != Suite("a", (Sample("one"), Sample("two", None, (Item("name", "two"),)))).digest


# --- the sentences that come with the package -----------------------------------------------------


@pytest.fixture(scope="module")
def english() -> Suite:
    return builtin_suite("english")


@pytest.fixture(scope="module")
def parallel() -> Suite:
    return builtin_suite("parallel")


def test_english_sentences(english: Suite) -> None:
    texts = [s.text for s in english.samples]
    assert len(texts) == len(set(texts)) >= 200
    assert english.languages == ["en"]
    assert all(3 <= len(text.split()) <= 30 for text in texts)
    demo = (DATA / "demo.txt").read_text(encoding="utf-8").splitlines()
    assert not set(texts) & set(demo)
    genres = Counter(json.loads(line)["genre"] for line in (DATA / "english.jsonl").open(encoding="utf-8"))
    assert len(genres) >= 20 and min(genres.values()) >= 10


def test_no_run_of_words_is_shared_with_the_demo(english: Suite, parallel: Suite) -> None:
    """Six words in a row in common would be a borrowed sentence."""

    def runs(text: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[i : i + 6]) for i in range(len(words) - 5)}

    demo = set().union(*map(runs, (DATA / "demo.txt").read_text(encoding="utf-8").splitlines()))
    for sample in [*english.samples, *parallel.samples]:
        assert not runs(sample.text) & demo, sample.text


def test_the_same_twenty_sentences_in_ten_languages(parallel: Suite) -> None:
    assert parallel.languages == list(LANGUAGES)
    assert Counter(s.language for s in parallel.samples) == dict.fromkeys(LANGUAGES, 20)
    texts = [s.text for s in parallel.samples]
    assert len(set(texts)) == 200
    kinds = {
        language: [sorted(i.kind for i in s.items()) for s in parallel.samples if s.language == language]
        for language in LANGUAGES
    }
    assert all(kinds[language] == kinds["en"] for language in LANGUAGES)


SCRIPTS = {"zh": "CJK", "ja": "HIRAGANA", "ko": "HANGUL", "ru": "CYRILLIC", "ar": "ARABIC"}


def test_each_language_is_written_in_its_script(parallel: Suite) -> None:
    for sample in parallel.samples:
        names = [unicodedata.name(c, "") for c in sample.text if c.isalpha()]
        script = SCRIPTS.get(str(sample.language), "LATIN")
        assert any(name.startswith(script) for name in names), sample.text
        if sample.language == "zh":
            assert not any(name.startswith(("HIRAGANA", "KATAKANA")) for name in names), sample.text


@pytest.mark.parametrize("name", BUILTIN)
def test_annotations_stand_in_their_texts(name: str) -> None:
    found: Counter[str] = Counter()
    for sample in builtin_suite(name).samples:
        assert sample.personal is not None
        for item in sample.personal:
            assert item.kind in KINDS
            assert item.text in sample.text and survives(item.text, sample.text)
            found[item.kind] += 1
    assert {"name", "date", "number", "email", "phone", "address"} <= found.keys()


@pytest.mark.parametrize("name", BUILTIN)
def test_addresses_and_numbers_are_nobodys(name: str) -> None:
    for sample in builtin_suite(name).samples:
        for item in sample.items():
            if item.kind == "email":
                assert item.text.endswith("@example.org")
            if item.kind == "phone":  # ranges that are kept free for fiction in the US and in the UK
                assert re.search(r"555[- ]01\d\d$|^020 7946 0\d\d\d$|^01632 960 ?\d{3}$", item.text), (
                    item.text
                )
            if item.kind == "ip":
                assert item.text.startswith("192.0.2.")
