"""Text <-> ids of one vocabulary: mask, end and padding, the cut at `max_tokens`, word starts.

Knows `tokenizers` and numpy. Must not know torch, the encoders whose vocabulary it wraps, or the
special tokens they put around a text: a row here is content, then end, then padding.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
from tokenizers import decoders

from unembed.errors import UnembedError

Family = Literal["wordpiece", "sentencepiece", "bytelevel", "words"]

MASK_NAMES = ("[MASK]", "<mask>", "<|mask|>")
END_NAMES = ("[SEP]", "</s>", "<eos>", "<|endoftext|>", "<|im_end|>", "[EOS]")
PAD_NAMES = ("[PAD]", "<pad>", "<|pad|>")
FORMAT = 1

# How WordPiece's separate punctuation is set in English, in this order.
_TIDY = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r" ([.,?!;:%)\]}])", r"\1"),
        (r"([(\[{$#@]) ", r"\1"),
        (r" ?' ?(s|t|re|ve|ll|d|m)\b", r"'\1"),
        (r"(?<=\w) ?([-/]) ?(?=\w)", r"\1"),
        (r"(?<=\d)([.,:]) (?=\d)", r"\1"),
        (r"\b([a-z]\.) (?=[a-z]\.)", r"\1"),
        (r'" ([^"]+) "', r'"\1"'),
    )
)


@dataclass(frozen=True)
class Encoded:
    """Texts as rows of ids, and as they read after the cut."""

    ids: np.ndarray  # (N, T) int64: content, end, padding
    texts: list[str]  # each text as cut, case and accents kept: embed these
    lengths: np.ndarray  # (N,) int64, tokens of content
    truncated: np.ndarray  # (N,) bool


class TextTokenizer:
    """Text <-> ids of one vocabulary, without the encoder's special tokens."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, *, mask_id: int, end_id: int, pad_id: int, name: str = ""
    ) -> None:
        """Wrap a copy of `tokenizer`, its padding, truncation and special tokens switched off."""
        spec = json.loads(tokenizer.to_str())
        spec |= {"padding": None, "truncation": None, "post_processor": None}
        self._family: Family = _family(spec)
        self._base = _build(spec)
        if self._base.decoder is None:
            self._base.decoder = _default_decoder(self._family, spec)
        vocabulary = self._base.get_vocab(with_added_tokens=True)
        self.mask_id, self.end_id, self.pad_id, self.name = mask_id, end_id, pad_id, name
        self.size: int = max(vocabulary.values(), default=-1) + 1
        for role, special in (("mask", mask_id), ("end", end_id), ("pad", pad_id)):
            if not 0 <= special < self.size:
                raise UnembedError(
                    f"{role}_id {special} is not in the vocabulary; expected an id below {self.size}."
                )
        if mask_id in (end_id, pad_id):
            raise UnembedError(
                f"mask_id {mask_id} is also the end or padding id; the mask needs an id of its own."
            )

        added = self._base.get_added_tokens_decoder()
        reserved = {i for i, token in added.items() if token.special} | {mask_id, end_id, pad_id}
        self._special = np.zeros(self.size, dtype=bool)
        self._special[list(reserved)] = True
        self.word_start = np.zeros(self.size, dtype=bool)  # True where a span may begin
        self._prefix = {"sentencepiece": "▁", "bytelevel": "Ġ"}.get(self._family, "")
        self._joiner = spec["model"].get("continuing_subword_prefix") or "##"
        starts = [i for token, i in vocabulary.items() if self._starts_word(token)]
        self.word_start[starts] = True
        self.word_start &= ~self._special
        self._content = _build(_hide(spec, reserved))

    @staticmethod
    def wrap(tokenizer: tokenizers.Tokenizer, *, name: str = "") -> TextTokenizer:
        """Find the special tokens by their usual names; a missing mask is added, end pads if need be."""
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        end_id = _find(tokenizer, END_NAMES)
        if end_id is None:
            raise UnembedError(
                f"this tokenizer has no end-of-text token; expected one of {', '.join(END_NAMES)}; "
                "build a TextTokenizer with its end_id instead."
            )
        mask_id, pad_id = _find(tokenizer, MASK_NAMES), _find(tokenizer, PAD_NAMES)
        if mask_id is None:
            tokenizer.add_special_tokens([MASK_NAMES[0]])
            mask_id = tokenizer.get_vocab(with_added_tokens=True)[MASK_NAMES[0]]
        pad_id = end_id if pad_id is None else pad_id
        return TextTokenizer(tokenizer, mask_id=mask_id, end_id=end_id, pad_id=pad_id, name=name)

    @staticmethod
    def load(path: Path) -> TextTokenizer:
        """Read what `save` wrote: a folder with tokenizer.json and tokens.json."""
        folder = Path(path)
        try:
            roles = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
            if roles["format"] != FORMAT:
                raise KeyError(f"format {roles['format']}")
            ids = {key: int(roles[key]) for key in ("mask_id", "end_id", "pad_id")}
            name = str(roles["name"])
        except OSError as error:
            raise UnembedError(
                f"no tokens.json in {folder}; expected a folder with tokenizer.json and tokens.json."
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise UnembedError(
                f"{folder / 'tokens.json'} is not what unembed writes ({error}); prepare it again."
            ) from error
        try:
            text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UnembedError(
                f"no readable tokenizer.json in {folder}; expected the one saved with tokens.json."
            ) from error
        return TextTokenizer(_build(text), name=name, **ids)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokens.json into a folder, which is made if need be."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        roles = {
            "format": FORMAT,
            "name": self.name,
            "mask_id": self.mask_id,
            "end_id": self.end_id,
            "pad_id": self.pad_id,
        }
        (folder / "tokenizer.json").write_text(self.to_json(), encoding="utf-8")
        (folder / "tokens.json").write_text(json.dumps(roles, indent=2) + "\n", encoding="utf-8")

    def names_as(self, other: TextTokenizer) -> bool:
        """Whether every id is the same token in both vocabularies."""
        mine, others = (t._base.get_vocab(with_added_tokens=True) for t in (self, other))
        return mine == others

    def to_json(self) -> str:
        """Return the vocabulary in the form of a tokenizer.json."""
        return self._base.to_str()

    def encode(self, texts: Sequence[str], *, max_tokens: int, allow_empty: bool = False) -> Encoded:
        """Turn texts into rows of `max_tokens` ids, each text cut to what its row holds.

        A cut text is tokenised again, because a word cut in two may be a word of its own; so
        encoding `texts` of the result gives the same ids. A text without a single token is an
        error, unless `allow_empty`, when its row has length 0.
        """
        if max_tokens < 1:
            raise UnembedError(f"max_tokens must be at least 1, not {max_tokens}.")
        encodings = self._run(texts, offsets=True)
        kept = list(texts)
        rows = [encoding.ids for encoding in encodings]
        truncated = np.fromiter((len(row) > max_tokens for row in rows), dtype=bool, count=len(rows))
        long = {i: encodings[i] for i in np.flatnonzero(truncated).tolist()}
        while long:
            long = self._cut(long, rows, kept, max_tokens)
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        if not allow_empty and not lengths.all():
            index = int(np.flatnonzero(lengths == 0)[0])
            what = "holds no token of the vocabulary" if kept[index].strip() else "is blank"
            raise UnembedError(
                f"text {index} {what} ({kept[index][:40]!r}); expected at least one word; leave it out."
            )

        ids = np.full((len(rows), max_tokens), self.pad_id, dtype=np.int64)
        content = np.arange(max_tokens) < lengths[:, None]
        ids[content] = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(lengths.sum()))
        short = np.flatnonzero(lengths < max_tokens)
        ids[short, lengths[short]] = self.end_id
        return Encoded(ids=ids, texts=kept, lengths=lengths, truncated=truncated)

    def spans(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return all the ids of each text, uncut; a text without a token gives an empty array."""
        return [np.array(encoding.ids, dtype=np.int64) for encoding in self._run(texts)]

    def decode(self, ids: np.ndarray | Sequence[Sequence[int] | np.ndarray]) -> list[str]:
        """Turn rows of ids into texts, each cut at its first end, special tokens left out."""
        rows = []
        for row in self._rows(ids):
            ends = np.flatnonzero(row == self.end_id)
            content = row[: ends[0]] if len(ends) else row
            rows.append(content[~self._special[content]].tolist())
        texts = self._base.decode_batch(rows, skip_special_tokens=False)
        if self._family != "wordpiece":
            return texts
        # A row may begin inside a word, whose joiner the decoder then leaves.
        inside = [bool(row) and not self.word_start[row[0]] for row in rows]
        return [
            tidy(t.removeprefix(self._joiner) if cut else t) for t, cut in zip(texts, inside, strict=True)
        ]

    def pieces(self, ids: np.ndarray | Sequence[int]) -> list[str]:
        """Return what each token of one row shows, so that joined without spaces they read as text.

        A word's first token brings its space, the mask is '_', other special tokens are ''. Bytes
        of a character shared by several tokens show at the last of them.
        """
        (row,) = self._rows([ids])
        shown: list[str] = []
        half = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for i in row.tolist():
            if self._special[i]:
                half.reset()
                shown.append(" _" if i == self.mask_id else "")
                continue
            token = self._base.id_to_token(i) or ""
            space = " " if self.word_start[i] else ""
            if self._family == "wordpiece":
                shown.append(space + token.removeprefix(self._joiner))
            elif self._family == "words":
                shown.append(space + token)
            else:
                shown.append(half.decode(self._bytes(token)))
        first = next((k for k, piece in enumerate(shown) if piece), None)
        if first is not None:
            shown[first] = shown[first].removeprefix(" ")
        return _respace(shown) if self._family == "wordpiece" else shown

    def _starts_word(self, token: str) -> bool:
        """Tell whether a token of this vocabulary begins a word."""
        if self._family == "wordpiece":
            return not token.startswith(self._joiner)
        return token.startswith(self._prefix)

    def _bytes(self, token: str) -> bytes:
        """Return the UTF-8 bytes behind a byte-level or SentencePiece token."""
        if self._family == "bytelevel":
            # An added token stands in the vocabulary as itself, outside the byte alphabet.
            return b"".join(_BYTE_OF.get(char, char.encode()) for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):  # byte fallback
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    def _run(self, texts: Sequence[str], *, offsets: bool = False) -> list[tokenizers.Encoding]:
        """Run the content tokenizer, with the offsets of the tokens only where they are needed."""
        if isinstance(texts, str):
            raise UnembedError("expected a list of texts, not one string; put it in brackets.")
        texts = list(texts)
        batch = self._content.encode_batch
        if not offsets:  # the fast one came with tokenizers 0.20
            batch = getattr(self._content, "encode_batch_fast", batch)
        try:
            return batch(texts, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            for index, text in enumerate(texts):
                if not isinstance(text, str):
                    raise UnembedError(
                        f"text {index} is {type(text).__name__}, not a string; give a list of strings."
                    ) from error
                if any("\ud800" <= char <= "\udfff" for char in text):
                    raise UnembedError(
                        f"text {index} holds half of a surrogate pair, which is not valid Unicode; "
                        "replace it."
                    ) from error
            raise

    def _cut(
        self, long: dict[int, tokenizers.Encoding], rows: list[list[int]], texts: list[str], max_tokens: int
    ) -> dict[int, tokenizers.Encoding]:
        """Cut the long rows and their texts in place; return those that are still too long."""
        again = []
        for i, encoding in long.items():
            offsets = encoding.offsets
            stop = _clean_end(offsets, max_tokens)
            if stop < len(texts[i]) and texts[i][:stop].strip():
                texts[i] = texts[i][:stop]
                again.append(i)
            else:
                # One character is worth more tokens than a row holds: keep its first ones.
                texts[i] = texts[i][: offsets[max_tokens - 1][1]]
                rows[i] = encoding.ids[:max_tokens]
        encodings = dict(zip(again, self._run([texts[i] for i in again], offsets=True), strict=True))
        for i, encoding in encodings.items():
            rows[i] = encoding.ids
        return {i: encoding for i, encoding in encodings.items() if len(rows[i]) > max_tokens}

    def _rows(self, ids: np.ndarray | Sequence[Sequence[int] | np.ndarray]) -> Iterator[np.ndarray]:
        """Yield each row of ids as an array, checked against the vocabulary."""
        for row in ids:
            array = np.asarray(row)
            if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
                raise UnembedError(
                    f"expected rows of integer ids, not shape {array.shape} of {array.dtype}; "
                    "give a list of rows, or an array of two dimensions."
                )
            array = array.astype(np.int64)
            if array.size and (array.min() < 0 or array.max() >= self.size):
                raise UnembedError(
                    f"an id lies outside the vocabulary of {self.size}; are these ids of another tokenizer?"
                )
            yield array


def _clean_end(offsets: list[tuple[int, int]], max_tokens: int) -> int:
    """Return where to cut: the end of the last kept token that shares no character with the next."""
    for k in range(max_tokens - 1, -1, -1):
        if offsets[k][1] <= offsets[k + 1][0]:
            return offsets[k][1]
    return 0


def _build(spec: dict[str, Any] | str) -> tokenizers.Tokenizer:
    """Build a tokenizer from the JSON of a tokenizer.json."""
    try:
        return tokenizers.Tokenizer.from_str(spec if isinstance(spec, str) else json.dumps(spec))
    except Exception as error:  # tokenizers raises bare Exception
        raise UnembedError(
            f"this tokenizer cannot be read ({error}); expected the JSON of a tokenizer.json."
        ) from error


def _hide(spec: dict[str, Any], reserved: set[int]) -> dict[str, Any]:
    """Rename the reserved tokens to strings that no text holds, so that none comes out of a text.

    Dropping them would shift the ids of added tokens behind them, and `encode_special_tokens`
    would leave them to the model: a unigram vocabulary lists '</s>' among its pieces.
    """
    spec = json.loads(json.dumps(spec))
    model, renamed = spec["model"], {}
    for token in spec["added_tokens"]:
        if token["id"] in reserved:
            renamed[token["content"]] = token["content"] = _unreachable(token["id"])
    if isinstance(model["vocab"], dict):
        names = {i: token for token, i in model["vocab"].items() if i in reserved}
        renamed |= {token: _unreachable(i) for i, token in names.items()}
        model["vocab"] = {renamed.get(token, token): i for token, i in model["vocab"].items()}
    else:  # unigram: pairs of piece and score, in the order of the ids
        for i in reserved:
            if i < len(model["vocab"]):
                model["vocab"][i][0] = _unreachable(i)
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    if model.get("merges"):
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, renamed)]
    return spec


def _unreachable(i: int) -> str:
    """Name a reserved id with a Unicode noncharacter and spaces, which tokenizers split or replace."""
    return f"\U0010ffff reserved {i} \U0010ffff"


def _makes(merge: str | list[str], renamed: dict[str, str]) -> bool:
    """Tell whether a BPE merge has a renamed token as a part or as its result."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in renamed or right in renamed or left + right in renamed


def _find(tokenizer: tokenizers.Tokenizer, names: Sequence[str]) -> int | None:
    """Return the id of the first of these names: among special tokens, then added, then all.

    In that order, because Gemma lists '</s>' as an HTML tag beside its special '<eos>'.
    """
    added = tokenizer.get_added_tokens_decoder()
    special = {token.content: i for i, token in added.items() if token.special}
    plain = {token.content: i for i, token in added.items()}
    for known in (special, plain, tokenizer.get_vocab(with_added_tokens=True)):
        for name in names:
            if name in known:
                return known[name]
    return None


def tidy(text: str) -> str:
    """Take out the spaces that WordPiece's decoder leaves around punctuation; the tokens stay the same.

    >>> tidy("it ' s 3 . 5 % ( e . g . mid - ocean ) , isn ' t it ?")
    "it's 3.5% (e.g. mid-ocean), isn't it?"
    """
    for pattern, replacement in _TIDY:
        text = pattern.sub(replacement, text)
    return text


def _respace(pieces: list[str]) -> list[str]:
    """Give the pieces of a text the spaces they have in the tidy text, which only ever lacks some."""
    text, place, out = tidy("".join(pieces)), 0, []
    for piece in pieces:
        core = piece.lstrip(" ")
        space = " " if core and text[place : place + 1] == " " else ""
        out.append(space + core)
        place += len(space) + len(core)
    return out


def _family(spec: dict[str, Any]) -> Family:
    """Tell how a vocabulary marks the start of a word."""
    if spec["model"]["type"] == "WordPiece":
        return "wordpiece"
    stages = json.dumps([spec["normalizer"], spec["pre_tokenizer"], spec["decoder"]], ensure_ascii=False)
    if '"ByteLevel"' in stages:
        return "bytelevel"
    return "sentencepiece" if "▁" in stages else "words"


def _default_decoder(family: Family, spec: dict[str, Any]) -> decoders.Decoder | None:
    """Choose the decoder of a tokenizer that was saved without one."""
    if family == "wordpiece":
        return decoders.WordPiece(prefix=spec["model"].get("continuing_subword_prefix") or "##")
    if family == "bytelevel":
        return decoders.ByteLevel()
    return decoders.Metaspace() if family == "sentencepiece" else None


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + k): b for k, b in enumerate(others)}


_BYTE_OF = {char: bytes([byte]) for char, byte in _byte_alphabet().items()}
