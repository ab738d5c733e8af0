"""corpus: preparing, killing and resuming, with a fake encoder and a word vocabulary."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from unembed import corpus
from unembed.corpus import PreparedData, prepare
from unembed.errors import UnembedError
from unembed.logbook import alone
from unembed.shards import read_manifest
from unembed.tokens import TextTokenizer

WORDS = "zero one two three four five six seven eight nine".split()


def word_tokenizer(words: Sequence[str] = WORDS) -> TextTokenizer:
    """Build a vocabulary of whole words; a text of other characters has no tokens."""
    vocabulary = {token: i for i, token in enumerate(["[PAD]", "[SEP]", "[MASK]", *words])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("-", "removed")]
    )
    return TextTokenizer.wrap(tokenizer, name="words")


class FakeEncoder:
    """Turn the hash of a text into a vector; optionally fail at some call."""

    name = "fake"

    def __init__(
        self, *, size: int = 8, fail_at: int = -1, error: type[BaseException] = KeyboardInterrupt
    ) -> None:
        self.size, self.fail_at, self.error = size, fail_at, error
        self.tokenizer = word_tokenizer()
        self.seen: list[str] = []
        self.calls = 0

    def encode(
        self, texts: Sequence[str], *, batch_size: int = 64, show_progress_bar: bool = False
    ) -> np.ndarray:
        """Hash each text."""
        self.calls += 1
        if self.calls == self.fail_at:
            raise self.error
        self.seen += texts
        return np.stack([vector(text, self.size) for text in texts])


def vector(text: str, size: int = 8) -> np.ndarray:
    """Return the fake vector of a text."""
    digest = hashlib.shake_128(text.encode()).digest(size)
    return np.frombuffer(digest, dtype=np.uint8).astype(np.float32) / 255


def numbered(n: int) -> list[str]:
    """Return n texts of 1 to 6 words, spelling their number."""
    return [" ".join(WORDS[int(d)] for d in str(k * 7919)) for k in range(n)]


def stopping(texts: list[str], *, after: int) -> Iterator[str]:
    """Give some texts; then Ctrl-C is pressed."""
    yield from texts[:after]
    raise KeyboardInterrupt


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take few texts at a time, so that a shard needs several calls of the encoder."""
    monkeypatch.setattr(corpus, "CHUNK", {"pairs": 4, "passages": 4})


def test_pairs_hold_what_was_given(tmp_path: Path) -> None:
    encoder = FakeEncoder()
    texts = numbered(23)
    texts[5:5] = ["", "-", "  "]  # left out: no tokens
    data = prepare(texts, encoder=encoder, out=tmp_path / "d", max_tokens=4, shard_size=10)
    kept = [text for text in texts if text.strip(" -")]
    assert (data.count, len(data), data.kind, data.max_tokens, data.embedding_size) == (23, 23, "pairs", 4, 8)
    assert data.encoder_name == "fake" and data.manifest["exhausted"]
    rows = np.array([22, 0, 13, 0, 9, 10])
    encoded = encoder.tokenizer.encode([kept[i] for i in rows], max_tokens=4)
    ids, vectors = data.ids(rows), data.vectors(rows)
    assert ids.dtype == np.int64 and vectors.dtype == np.float32
    assert (ids == encoded.ids).all()
    # The vector is that of the text as cut.
    expected = np.stack([vector(text) for text in encoded.texts])
    np.testing.assert_array_equal(vectors, expected.astype(np.float16))
    assert data.manifest["truncated"] == sum(len(text.split()) > 4 for text in kept)
    assert [shard["count"] for shard in data.manifest["shards"]] == [10, 10, 3]
    assert data.tokenizer.decode(data.ids(np.array([1]))) == ["seven nine one nine"]
    data.verify()
    assert data.ids(np.array([], dtype=np.int64)).shape == (0, 4)
    for bad in ([23], [-1]):
        with pytest.raises(UnembedError, match="rows must lie between 0 and 22"):
            data.ids(np.array(bad))
    with pytest.raises(UnembedError, match="which have no tokens"):
        _ = data.tokens


def test_passages_are_whole_and_need_no_encoder(tmp_path: Path) -> None:
    texts = [*numbered(11), "-"]
    data = prepare(
        texts,
        encoder="some",
        tokenizer=word_tokenizer(),
        out=tmp_path,
        kind="passages",
        max_tokens=2,
        shard_size=4,
    )
    spans = word_tokenizer().spans(texts[:11])
    assert data.tokens.dtype == np.uint16 and (data.tokens == np.concatenate(spans)).all()
    assert data.offsets.dtype == np.int64 and data.offsets.shape == (12,)
    assert (np.diff(data.offsets) == [len(span) for span in spans]).all()
    assert (data.encoder_name, data.embedding_size, data.manifest["truncated"]) == ("some", 0, 0)
    with pytest.raises(UnembedError, match="which have no vectors"):
        data.vectors(np.array([0]))
    encoder = FakeEncoder()
    assert prepare(texts, encoder=encoder, out=tmp_path / "e", kind="passages").embedding_size == 8
    assert encoder.calls == 0


def test_a_large_vocabulary_takes_wider_ids(tmp_path: Path) -> None:
    tokenizer = word_tokenizer([*(f"w{i}" for i in range(66_000)), *WORDS])
    data = prepare(["one w5", "nine"], encoder="some", tokenizer=tokenizer, out=tmp_path, kind="passages")
    assert data.tokens.dtype == np.uint32
    assert data.tokenizer.decode([data.tokens[:2]]) == ["one w5"]


def test_short_texts_can_be_left_out(tmp_path: Path) -> None:
    data = prepare(["one", "one two", "one two six"], encoder=FakeEncoder(), out=tmp_path, min_tokens=2)
    assert data.count == 2


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_killed_run_ends_as_if_it_had_not_been(
    tmp_path: Path, fail_at: int, error: type[BaseException]
) -> None:
    texts = numbered(23)
    texts[3:3] = ["-", ""]
    texts[15:15] = ["-"] * 7
    options: dict[str, Any] = {"max_tokens": 4, "shard_size": 10, "source_names": ["texts"]}
    prepare(texts, encoder=FakeEncoder(), out=tmp_path / "whole", **options)
    first = FakeEncoder(fail_at=fail_at, error=error)
    with pytest.raises(error):
        prepare(iter(texts), encoder=first, out=tmp_path / "cut", **options)
    encoder = FakeEncoder()
    data = prepare(iter(texts), encoder=encoder, out=tmp_path / "cut", **options)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert len(first.seen) + len(encoder.seen) == 23  # nothing is embedded twice
    data.verify()
    # A third run has nothing to do.
    idle = FakeEncoder()
    prepare(iter(texts), encoder=idle, out=tmp_path / "cut", **options)
    assert idle.calls == 0 and contents(tmp_path / "cut") == contents(tmp_path / "whole")


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.sampled_from(["one", "-", "", "two three", "nine nine nine nine"]), max_size=30),
    stops=st.lists(st.integers(1, 6), max_size=4),
    shard_size=st.integers(1, 9),
    limits=st.lists(st.integers(1, 25), max_size=3),
)
def test_any_history_gives_the_same_folder(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    stops: list[int],
    shard_size: int,
    limits: list[int],
) -> None:
    texts = [*texts, "one"]  # there is something to keep
    folder = tmp_path_factory.mktemp("history")
    prepare(texts, encoder=FakeEncoder(), out=folder / "whole", max_tokens=3, shard_size=shard_size)
    for stop, limit in zip(stops, [*sorted(limits), None, None, None, None], strict=False):
        encoder = FakeEncoder(fail_at=stop)
        try:
            prepare(
                texts, encoder=encoder, out=folder / "cut", max_tokens=3, shard_size=shard_size, limit=limit
            )
        except KeyboardInterrupt:
            pass
    prepare(texts, encoder=FakeEncoder(), out=folder / "cut", max_tokens=3, shard_size=shard_size)
    assert contents(folder / "cut") == contents(folder / "whole")


@pytest.mark.parametrize("kind", ["pairs", "passages"])
@pytest.mark.parametrize("stopped", [False, True])
def test_what_is_listed_is_there_wherever_a_run_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, stopped: bool
) -> None:
    texts, replace = numbered(19), os.replace
    options: dict[str, Any] = {"kind": kind, "tokenizer": word_tokenizer(), "shard_size": 8}
    prepare(texts, encoder=FakeEncoder(), out=tmp_path / "whole", **options)
    for room in range(1, 12):  # files that get their names before the kill
        folder = tmp_path / f"cut-{room}"
        if stopped:
            with pytest.raises(KeyboardInterrupt):
                prepare(stopping(texts, after=5), encoder=FakeEncoder(), out=folder, **options)
        left = room

        def fragile(source: Path, target: Path) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            replace(source, target)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "replace", fragile)
            prepare(texts, encoder=FakeEncoder(), out=folder, **options)
        if read_manifest(folder)["shards"]:
            PreparedData.open(folder).verify()
        prepare(texts, encoder=FakeEncoder(), out=folder, **options)
        assert contents(folder) == contents(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["pairs", "passages"])
def test_a_stopped_run_keeps_what_it_has(tmp_path: Path, kind: Any) -> None:
    texts = [*numbered(10), "-", *numbered(20)[10:]]
    options: dict[str, Any] = {"kind": kind, "encoder": FakeEncoder()}
    prepare(texts, out=tmp_path / "whole", **options)
    for after, kept in ((3, 0), (9, 8), (10, 8), (14, 11), (20, 19)):  # in chunks of four
        with pytest.raises(KeyboardInterrupt):
            prepare(stopping(texts, after=after), out=tmp_path / "cut", **options)
        assert read_manifest(tmp_path / "cut")["count"] == kept
        if kept:
            PreparedData.open(tmp_path / "cut").verify()
    prepare(texts, out=tmp_path / "cut", **options)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_one_run_at_a_time_fills_a_folder(tmp_path: Path) -> None:
    prepare(numbered(9), encoder=FakeEncoder(), out=tmp_path / "d", limit=4)
    before = contents(tmp_path / "d")
    with alone(tmp_path / "d"), pytest.raises(UnembedError, match="d is being written by another run; wait"):
        prepare(numbered(9), encoder=FakeEncoder(), out=tmp_path / "d")
    assert contents(tmp_path / "d") == before
    assert prepare(numbered(9), encoder=FakeEncoder(), out=tmp_path / "d").count == 9


def test_the_digest_is_of_what_the_data_holds(tmp_path: Path) -> None:
    def digest(texts: list[str], name: str, **options: Any) -> str:
        return prepare(texts, **{"encoder": FakeEncoder(), "out": tmp_path / name, **options}).digest

    data = digest(numbered(9), "a", source_names=["here"])
    assert digest(numbered(9), "b", source_names=["there"]) == data  # prepared again
    (tmp_path / "a").rename(tmp_path / "moved")
    assert PreparedData.open(tmp_path / "moved").digest == data
    other = FakeEncoder()
    other.name = "other"
    others = [
        digest(numbered(10)[1:], "texts"),
        digest(numbered(10), "more"),
        digest(numbered(9), "encoder", encoder=other),
        digest(numbered(9), "words", tokenizer=word_tokenizer([*WORDS, "ten"])),
        digest(numbered(9), "kind", kind="passages"),
    ]
    assert len({data, *others}) == 6


def test_a_limit_can_grow_but_not_shrink(tmp_path: Path) -> None:
    texts = numbered(30)
    prepare(texts, encoder=FakeEncoder(), out=tmp_path / "whole", shard_size=8, limit=20)
    prepare(texts, encoder=FakeEncoder(), out=tmp_path / "grown", shard_size=8, limit=11)
    assert prepare(texts, encoder=FakeEncoder(), out=tmp_path / "grown", shard_size=8, limit=20).count == 20
    assert contents(tmp_path / "grown") == contents(tmp_path / "whole")
    with pytest.raises(UnembedError, match="already holds 20 texts, more than the limit 5"):
        prepare(texts, encoder=FakeEncoder(), out=tmp_path / "grown", shard_size=8, limit=5)


def test_other_settings_need_another_folder(tmp_path: Path) -> None:
    source = tmp_path / "texts.txt"
    source.write_text("\n".join(numbered(5)))
    base: dict[str, Any] = {"out": tmp_path / "d", "max_tokens": 4, "source_names": [source]}
    prepare(numbered(5), encoder=FakeEncoder(), **base)
    entry = PreparedData.open(tmp_path / "d").manifest["sources"]
    assert entry == [
        {
            "name": "texts.txt",
            "bytes": source.stat().st_size,
            "sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
        }
    ]
    other = FakeEncoder()
    other.tokenizer = word_tokenizer([*WORDS, "ten"])
    cases: list[tuple[FakeEncoder, dict[str, Any], str]] = [
        (FakeEncoder(), {"max_tokens": 5}, "max_tokens 4, now 5"),
        (FakeEncoder(size=9), {}, "embedding_size 8, now 9"),
        (FakeEncoder(), {"kind": "passages"}, "kind 'pairs', now 'passages'"),
        (FakeEncoder(), {"source_names": ["c4"]}, r"sources texts.txt of \d+ bytes, now c4"),
        (other, {}, "vocab_size 13, now 14; another tokenizer"),
    ]
    for encoder, change, message in cases:
        with pytest.raises(UnembedError, match=message + r".*choose another folder"):
            prepare(numbered(5), encoder=encoder, **(base | change))
    source.write_text("other")
    with pytest.raises(UnembedError, match="sources texts.txt"):
        prepare(numbered(5), encoder=FakeEncoder(), **base)


def test_a_source_that_became_shorter(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare(numbered(20), encoder=FakeEncoder(fail_at=4), out=tmp_path, shard_size=8)
    with pytest.raises(UnembedError, match="ends before the 12 texts"):
        prepare(numbered(3), encoder=FakeEncoder(), out=tmp_path, shard_size=8)


class BadEncoder(FakeEncoder):
    """Return vectors that cannot be stored."""

    def __init__(self, value: float, columns: int = 8) -> None:
        super().__init__()
        self.value, self.columns = value, columns

    def encode(
        self, texts: Sequence[str], *, batch_size: int = 64, show_progress_bar: bool = False
    ) -> np.ndarray:
        """Fill every vector with the value."""
        return np.full((len(texts), self.columns), self.value, dtype=np.float32)


def test_bad_vectors(tmp_path: Path) -> None:
    for k, value in enumerate((np.nan, np.inf, 1e6)):
        with pytest.raises(UnembedError, match="returned NaN, or a number too large .* for 'one two'"):
            prepare(["one two"], encoder=BadEncoder(value), out=tmp_path / str(k))
    with pytest.raises(UnembedError, match=r"returned shape \(1, 3\); expected \(1, 8\)"):
        prepare(["one two"], encoder=BadEncoder(0.5, columns=3), out=tmp_path / "shape")


def test_bad_requests(tmp_path: Path) -> None:
    bare = FakeEncoder()
    del bare.tokenizer
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (bare, {}, "brings no tokenizer; pass tokenizer="),
        ("fake", {"tokenizer": word_tokenizer()}, "need the encoder itself"),
        (FakeEncoder(), {"kind": "pair"}, "unknown kind 'pair'; did you mean 'pairs'"),
        (FakeEncoder(), {"max_tokens": 0}, "max_tokens must be at least 1"),
        (FakeEncoder(), {"limit": 0}, "limit must be at least 1"),
    ]
    for encoder, options, message in cases:
        with pytest.raises(UnembedError, match=message):
            prepare(["one"], encoder=encoder, out=tmp_path / "d", **options)
    assert not (tmp_path / "d").exists()
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    for name in ("file", "full"):
        with pytest.raises(UnembedError, match="is not a prepared folder"):
            prepare(["one"], encoder=FakeEncoder(), out=tmp_path / name)
    # What a kill leaves of the very first manifest is no one else's.
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / ".manifest.json.partial").write_text("{")
    assert len(prepare(["one"], encoder=FakeEncoder(), out=tmp_path / "torn")) == 1
    for _ in range(2):
        with pytest.raises(UnembedError, match="no text of at least 1 tokens in the source"):
            prepare(["-"], encoder=FakeEncoder(), out=tmp_path / "none")
    with pytest.raises(UnembedError, match="no finished shard"):
        PreparedData.open(tmp_path / "none")


def test_a_folder_without_shards_is_new(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    options: dict[str, Any] = {"out": tmp_path / "d", "shard_size": 4}
    with pytest.raises(UnembedError, match="no text of at least 1 tokens in empty.txt of 0 bytes"):
        prepare([], encoder=FakeEncoder(), source_names=[tmp_path / "empty.txt"], **options)
    with pytest.raises(KeyboardInterrupt):
        prepare(numbered(9), encoder=FakeEncoder(fail_at=1), source_names=["c4"], **options)
    other = FakeEncoder(size=9)
    other.tokenizer = word_tokenizer([*WORDS, "ten"])
    data = prepare(numbered(9), encoder=other, source_names=["texts"], **options)
    assert (data.count, data.embedding_size, data.tokenizer.size) == (9, 9, 14)
    assert data.manifest["sources"] == [{"name": "texts"}]
    data.verify()


def test_an_encoder_without_a_vocabulary_takes_one(tmp_path: Path) -> None:
    bare = FakeEncoder()
    del bare.tokenizer
    assert prepare(["one"], encoder=bare, tokenizer=word_tokenizer(), out=tmp_path).count == 1


def test_damage_is_found(tmp_path: Path) -> None:
    prepare(numbered(9), encoder=FakeEncoder(), out=tmp_path, shard_size=4)
    target = tmp_path / "00001.vectors.npy"
    whole = target.read_bytes()
    target.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UnembedError, match="00001.vectors.npy is not the file that was written"):
        PreparedData.open(tmp_path).verify()
    target.write_bytes(whole[:-10])
    with pytest.raises(UnembedError, match="missing or damaged"):
        PreparedData.open(tmp_path)
    target.write_bytes((tmp_path / "00002.vectors.npy").read_bytes())
    with pytest.raises(UnembedError, match="shard 00001 .* not of the shape"):
        PreparedData.open(tmp_path)
    np.save(target, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(UnembedError, match="missing or damaged"):
        PreparedData.open(tmp_path)
    target.unlink()
    with pytest.raises(UnembedError, match="missing or damaged"):
        PreparedData.open(tmp_path)


def test_progress_goes_to_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prepare(numbered(5), encoder=FakeEncoder(), out=tmp_path / "a", limit=5, show_progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "5/5" in err
    prepare(numbered(5), encoder=FakeEncoder(), out=tmp_path / "b")
    assert capfd.readouterr() == ("", "")
