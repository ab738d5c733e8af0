"""sources: every kind of file, standard input and streams, whole and broken."""

from __future__ import annotations

import gzip
import io
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unembed import sources
from unembed.errors import UnembedError
from unembed.sources import read_texts, stream_dataset

# --- files --------------------------------------------------------------------------------------


def test_every_kind_of_file(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    lines = "\ufeffone two\r\n\n  \nthrée\u2028four \n".encode()
    records = b'{"text": "one two", "n": 1}\n\n{"text": " "}\n{"text": "thr\\u00e9e\\u2028four"}\n'
    for name, data in [("a.txt", lines), ("a.jsonl", records)]:
        (tmp_path / name).write_bytes(data)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(data))
        (tmp_path / f"{name}.xz").write_bytes(lzma.compress(data))
    table = pyarrow.table({"text": ["one two", None, " ", "thrée\u2028four"], "n": [1, 2, 3, 4]})
    parquet.write_table(table, tmp_path / "a.parquet")
    for ending in sources.ENDINGS:
        assert list(read_texts(tmp_path / f"a{ending}")) == ["one two", "thrée\u2028four"], ending
    both = read_texts([str(tmp_path / "a.txt"), tmp_path / "a.jsonl.xz"])
    assert len(list(both)) == 4


def test_other_fields_and_half_surrogates(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "one"}\n{"body": "two \\ud83d."}\n{"body": "\\ud83d\\ude00"}\n')
    assert list(read_texts(path, field="body")) == ["one", "two \ufffd.", "😀"]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("öne\n\ntwo".encode())))
    assert list(read_texts("-")) == ["öne", "two"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(UnembedError, match="standard input is empty"):
        list(read_texts("-"))


def test_reading_is_lazy(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\nbroken\n')
    texts = read_texts(path)
    assert next(texts) == "one"
    with pytest.raises(UnembedError, match="line 2 is not JSON"):
        next(texts)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"", "a.txt is empty"),
        ("a.txt", b"\n \n", "a.txt is empty"),
        ("a.txt", b"one\n\xff\xfe\n", "not UTF-8 text .line 2"),
        ("a.txt", b"one\0two", "not UTF-8 text"),
        ("a.txt", "one".encode("utf-16"), "not UTF-8 text"),
        ("a.txt.gz", b"one", "not a whole compressed file"),
        ("a.txt.gz", gzip.compress(b"one\n" * 999)[:-9], "not a whole compressed file"),
        ("a.txt.xz", b"one", "not a whole compressed file"),
        ("a.txt.xz", lzma.compress(b"one\n" * 999)[:-9], "not a whole compressed file"),
        ("a.jsonl", b"[1]\n", "line 1 is not a JSON object"),
        ("a.jsonl", b'{"body": 1, "id": 2}', "line 1 has no field 'text'; it has body, id"),
        ("a.jsonl", b'{"text": 1}', "field 'text' is not a string"),
        ("a.parquet", b"one", "not a Parquet file"),
        ("a.csv", b"one", "expected a file ending in .txt"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UnembedError, match=message):
        list(read_texts(tmp_path / name))


def test_bad_paths_are_errors_at_once(tmp_path: Path) -> None:
    cases: list[tuple[Any, str]] = [
        (tmp_path / "none.txt", "there is no file"),
        (tmp_path, "cannot read"),
        ([], "no file"),
    ]
    for paths, message in cases:
        with pytest.raises(UnembedError, match=message):
            read_texts(paths)


def test_bad_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": ["one"], "n": [1]}), path)
    with pytest.raises(UnembedError, match="no column 'text'; it has body, n"):
        list(read_texts(path))
    with pytest.raises(UnembedError, match="does not hold strings"):
        list(read_texts(path, field="n"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UnembedError, match="needs the package pyarrow"):
        list(read_texts(path))


# --- the hub ------------------------------------------------------------------------------------


class FakeHub:
    """Stand in for the module datasets."""

    def __init__(self, texts: dict[str, list[str]], *, breaks: bool = False) -> None:
        self.texts, self.breaks, self.asked = texts, breaks, []  # type: ignore[var-annotated]

    def load_dataset(self, path: str, name: str, *, split: str, streaming: bool) -> Iterator[dict[str, str]]:
        """Return the stream of one language."""
        self.asked.append((path, name, split, streaming))
        if name not in self.texts:
            raise ConnectionError("Couldn't reach 'allenai/c4' on the Hub\nand more")
        return self._stream(name)

    def _stream(self, name: str) -> Iterator[dict[str, str]]:
        for text in self.texts[name]:
            yield {"text": text, "url": ""}
        if self.breaks:
            raise OSError("connection lost")


def test_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub({"en": ["a", "b", "c"], "zh": ["x"]})
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert list(stream_dataset("c4")) == ["a", "b", "c"]
    assert hub.asked == [("allenai/c4", "en", "train", True)]
    assert list(stream_dataset("mc4:en, zh")) == ["a", "x", "b", "c"]


def test_mc4_is_the_ten_languages(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub({language: [language] for language in sources.LANGUAGES})
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert list(stream_dataset("mc4")) == list(sources.LANGUAGES)


def test_streams_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", FakeHub({"en": ["a"]}, breaks=True))
    with pytest.raises(UnembedError, match=r"cannot stream mc4:xx .*Couldn't reach 'allenai/c4' on the Hub;"):
        stream_dataset("mc4:xx")
    with pytest.raises(UnembedError, match="connection lost"):
        list(stream_dataset("c4"))
    for spec in ("c5", "c4:en", "mc4:en,,zh", ""):
        with pytest.raises(UnembedError, match="unknown dataset"):
            stream_dataset(spec)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UnembedError, match="needs the package datasets"):
        stream_dataset("c4")
