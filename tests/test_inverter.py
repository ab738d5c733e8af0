"""`Inverter`: vectors of every kind in, text out; what is wrong is said in a sentence."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from unembed.config import Config
from unembed.decode import DecodeOptions
from unembed.errors import UnembedError
from unembed.inverter import Inverter
from unembed.model import Denoiser
from unembed.results import Inversion, Reconstruction
from unembed.strategies import STRATEGIES
from unembed.tokens import TextTokenizer

SPECIAL = ["[PAD]", "[UNK]", "[SEP]", "[MASK]"]
WORDS = "the a small old red cat dog bird sat ran on under mat roof road today ##s ##ed near far".split()
T, E = 8, 12
every_strategy = pytest.mark.parametrize("strategy", list(STRATEGIES))


def taken(strategy: str, steps: int) -> int:
    """Return the steps a strategy takes when it is asked for so many: one that is causal takes all."""
    return T if STRATEGIES[strategy].causal else steps


def small_tokenizer() -> TextTokenizer:
    base = Tokenizer(models.WordPiece({t: i for i, t in enumerate(SPECIAL + WORDS)}, unk_token="[UNK]"))
    base.normalizer = normalizers.Lowercase()
    base.pre_tokenizer = pre_tokenizers.Whitespace()
    base.add_special_tokens(SPECIAL)
    return TextTokenizer.wrap(base)


def small_inverter(**changes: Any) -> Inverter:
    """Return an inverter of random weights, whose texts have different lengths."""
    tokenizer = small_tokenizer()
    config = Config().override(
        encoder="fake", layers=1, hidden=16, heads=2, ffn=32, max_tokens=T, vocab_size=tokenizer.size,
        mask_id=tokenizer.mask_id, end_id=tokenizer.end_id, pad_id=tokenizer.pad_id, embedding_size=E,
        adaln_rank=0, causal=True, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Denoiser(config.model).requires_grad_(False)
    for p in model.parameters():
        p.add_(torch.randn_like(p) * 0.3)
    model.bias[[tokenizer.end_id, tokenizer.pad_id]] += 0.5
    return Inverter(model, config=config, tokenizer=tokenizer, facts={"data": ["a test"]}, device="cpu")


@pytest.fixture(scope="module")
def inverter() -> Inverter:
    return small_inverter()


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((9, E)).astype(np.float32)


class FakeEncoder:
    """Gives every text a vector of its own, and notes what it was asked."""

    name = "fake"

    def __init__(self, size: int = E) -> None:
        self.size, self.seen = size, list[str]()

    def encode(
        self, texts: Sequence[str], *, batch_size: int = 64, show_progress_bar: bool = False
    ) -> np.ndarray:
        self.seen += texts
        rows = [np.random.default_rng(list(text.encode())).standard_normal(self.size) for text in texts]
        return np.array(rows, dtype=np.float32).reshape(-1, self.size)


# What comes out


@every_strategy
def test_an_inversion_is_whole(inverter: Inverter, vectors: np.ndarray, strategy: str) -> None:
    found = inverter.invert(vectors, strategy=strategy, steps=5, seed=0)
    assert len(found) == len(vectors)
    for one in found:
        assert isinstance(one, Inversion) and one.strategy == strategy
        assert len(one.ids) == len(one.confidences) <= T
        assert all(0 < c <= 1 for c in one.confidences)
        assert inverter.tokenizer.end_id not in one.ids and inverter.tokenizer.mask_id not in one.ids
        assert one.text == inverter.tokenizer.decode([one.ids])[0]
        each = DecodeOptions.beams if STRATEGIES[strategy].beams else 1
        assert 1 <= one.forward_passes <= each * taken(strategy, 5)
    assert len({len(one.ids) for one in found}) > 1  # a test of one length would say little
    plain = inverter.invert(vectors, strategy=strategy, steps=1, seed=0)
    doubled = inverter.invert(vectors, strategy=strategy, steps=1, seed=0, guidance=1 + 1e-9)
    assert [one.forward_passes for one in doubled] == [2 * one.forward_passes for one in plain]


@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        ({}, "beam"),
        ({"strategy": "auto", "temperature": 0.8}, "causal"),
        ({"steps": 3}, "confidence"),
        ({"steps": T}, "beam"),
    ],
)
def test_unasked_the_model_does_its_best(
    inverter: Inverter, vectors: np.ndarray, options: dict[str, Any], strategy: str
) -> None:
    found = inverter.invert(vectors, seed=0, **options)
    assert found == inverter.invert(vectors, seed=0, **(options | {"strategy": strategy}))
    assert {one.strategy for one in found} == {strategy}
    *_, last = inverter.stream(vectors[0], seed=0, **options)
    assert (last.ids, last.total) == (found[0].ids, taken(strategy, 3))
    refined = inverter.invert(
        vectors[:2], seed=0, refine="encoder", encoder=FakeEncoder(), rounds=1, candidates=2, **options
    )
    assert {one.strategy for one in refined} == {strategy}


def test_a_model_that_cannot_read_left_to_right_does_its_best(vectors: np.ndarray) -> None:
    inverter = small_inverter()
    inverter.config = inverter.config.override(causal=False)
    inverter.model.config = inverter.config.model  # type: ignore[assignment]
    found = inverter.invert(vectors, seed=0)
    assert found == inverter.invert(vectors, "confidence", 8, seed=0)
    assert {one.strategy for one in found} == {"confidence"}


@every_strategy
def test_the_stream_ends_in_what_invert_returns(
    inverter: Inverter, vectors: np.ndarray, strategy: str
) -> None:
    for steps in range(1, T + 1):
        for vector in vectors[:4]:
            options: dict[str, Any] = {"strategy": strategy, "steps": steps, "seed": 3}
            (one,) = inverter.invert(vector, **options)
            frames = list(inverter.stream(vector, **options))
            total = taken(strategy, steps)
            assert [(f.index, f.total) for f in frames] == [(i, total) for i in range(1, total + 1)]
            last = frames[-1]
            assert (last.text, last.ids, last.confidences) == (one.text, one.ids, one.confidences)
            # A text that starts in the middle of a word keeps the joiner of its first token.
            assert "".join(last.pieces).split() == one.text.removeprefix("##").split()


@every_strategy
def test_a_seed_gives_the_same_texts_whatever_the_batch(
    inverter: Inverter, vectors: np.ndarray, strategy: str
) -> None:
    for temperature in (None, *[1.0] * (not STRATEGIES[strategy].beams)):
        options: dict[str, Any] = {"strategy": strategy, "steps": 4, "temperature": temperature}
        whole = inverter.invert(vectors, seed=1, **options)
        for size in (1, 4, 9):
            parts = inverter.invert(vectors, seed=1, batch_size=size, **options)
            assert [p.ids for p in parts] == [w.ids for w in whole]
            for p, w in zip(parts, whole, strict=True):
                np.testing.assert_allclose(p.confidences, w.confidences, atol=1e-5)
        if strategy == "euler" or temperature:
            other = inverter.invert(vectors, seed=2, **options)
            assert [o.ids for o in other] != [w.ids for w in whole]
            loose = (inverter.invert(vectors, **options) for _ in range(2))
            assert len({str([one.ids for one in found]) for found in loose}) == 2


def test_a_deterministic_strategy_needs_no_seed(inverter: Inverter, vectors: np.ndarray) -> None:
    assert inverter.invert(vectors) == inverter.invert(vectors)


def test_progress_goes_to_stderr(
    inverter: Inverter, vectors: np.ndarray, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = inverter.invert(vectors, batch_size=2, show_progress=True)
    out, err = capfd.readouterr()
    assert not out and "inverting" in err
    assert [s.ids for s in shown] == [s.ids for s in inverter.invert(vectors, batch_size=2)]
    assert capfd.readouterr() == ("", "")


def test_each_batch_is_handed_over_when_it_is_done(inverter: Inverter, vectors: np.ndarray) -> None:
    search: dict[str, Any] = {"encoder": FakeEncoder(), "rounds": 1, "candidates": 4, "refine": "encoder"}
    for options in ({}, search):
        batches: list[list[Inversion]] = []
        found = inverter.invert(vectors, seed=1, batch_size=4, on_batch=batches.append, **options)
        assert [len(batch) for batch in batches] == [4, 4, 1]
        assert [each for batch in batches for each in batch] == found


# What goes in


@pytest.mark.parametrize(
    "make",
    [
        lambda v: v * 250.0,
        lambda v: v * 1e-3,
        lambda v: v * np.arange(1, 10, dtype=np.float32)[:, None],
        lambda v: torch.from_numpy(v),
        lambda v: v.tolist(),
    ],
    ids=["long", "short", "uneven", "torch", "lists"],
)
def test_vectors_of_every_kind_give_the_same_text(inverter: Inverter, vectors: np.ndarray, make: Any) -> None:
    given = make(vectors)
    assert [i.ids for i in inverter.invert(given)] == [i.ids for i in inverter.invert(vectors)]
    assert [i.ids for i in inverter.invert(given[2])] == [inverter.invert(vectors)[2].ids]


def test_an_unknown_precision_is_named() -> None:
    known = small_inverter()
    with pytest.raises(UnembedError, match=r"unknown precision 'fp8'.* Known: auto, fp32, bf16, int8"):
        Inverter(known.model, config=known.config, tokenizer=known.tokenizer, precision="fp8")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("tpu", "unknown device 'tpu'; expected cpu, cuda, cuda:1 or mps."),
        (1.5, "unknown device 1.5; expected"),
        ("cuda:77", "there is no device cuda:77 here; leave it out, or say cpu."),
    ],
)
def test_a_device_that_is_not_there_is_named(device: Any, said: str, tmp_path: Path) -> None:
    known = small_inverter()
    with pytest.raises(UnembedError, match=said):
        Inverter(known.model, config=known.config, tokenizer=known.tokenizer, device=device)
    known.save_pretrained(tmp_path)
    with pytest.raises(UnembedError, match=said):
        Inverter.from_pretrained(tmp_path, device=device)


def test_no_vectors_give_no_texts(inverter: Inverter) -> None:
    assert inverter.invert(np.zeros((0, E))) == inverter.invert([]) == []
    assert inverter.invert(torch.zeros(0, E)) == []


@pytest.mark.parametrize(
    ("vectors", "said"),
    [
        (np.ones((2, E + 1)), rf"shape \(2, {E + 1}\), expected \(N, {E}\) as fake makes them; choose"),
        (np.full(E, np.nan), "vector 0 holds NaN or infinity"),
        (torch.zeros(E), "vector 0 is all zeros"),
        (None, "vectors must be numbers"),
    ],
)
def test_bad_vectors_are_refused_in_a_sentence(inverter: Inverter, vectors: Any, said: str) -> None:
    for invert in (inverter.invert, inverter.stream, inverter.search):
        with pytest.raises(UnembedError, match=said):
            invert(vectors)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": 0}, f"steps must be between 1 and {T} .*not 0"),
        ({"steps": T + 1}, f"steps must be between 1 and {T} .*not {T + 1}"),
        ({"strategy": "confidense"}, "did you mean 'confidence'"),
        ({"strategy": "two_stage"}, "did you mean 'two-stage'"),
        ({"temperature": -1.0}, "temperature must be 0 or more"),
        ({"guidance": -1.0}, "guidance must be 0 or more"),
        ({"remask": 2.0}, "remask must be between 0 and 1"),
        ({"restart": float("nan")}, "restart must be between 0 and 1"),
        ({"reveal": "fast"}, "reveal must be linear or cosine"),
        ({"beams": 0}, "beams must be a whole number from 1 to 128, not 0"),
        ({"drafts": 65}, "drafts must be a whole number from 1 to 64, not 65"),
        ({"drafts": 2, "steps": 1}, "steps must be at least 2 with drafts, not 1"),
        ({"strategy": "beam", "temperature": 0.7}, "leave temperature out"),
        ({"remaks": 0.1}, "unknown option 'remaks'; known: remask, restart, reveal, beams, looks, drafts"),
        ({"seed": -1}, "seed must be 0 or more"),
        ({"seed": 1.5}, "seed must be 0 or more, a whole number below 2\\*\\*128, not 1.5"),
        ({"steps": "8"}, "steps must be a whole number, not '8'"),
        ({"beams": 2.5}, "beams must be a whole number from 1 to 128, not 2.5"),
        ({"temperature": "hot"}, "temperature must be 0 or more, not 'hot'"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(
    inverter: Inverter, vectors: np.ndarray, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnembedError, match=said):
        inverter.invert(vectors, **options)
    with pytest.raises(UnembedError, match=said):
        next(inverter.stream(vectors[0], **options))


def test_steps_are_checked_even_without_vectors(inverter: Inverter) -> None:
    with pytest.raises(UnembedError, match="steps"):
        inverter.invert(np.zeros((0, E)), steps=0)


def test_a_batch_holds_something(inverter: Inverter, vectors: np.ndarray) -> None:
    for size in (0, "64", 2.5):
        with pytest.raises(UnembedError, match=f"batch_size must be at least 1, not {size!r}"):
            inverter.invert(vectors, batch_size=size)  # type: ignore[arg-type]


def test_a_stream_is_of_one_vector(inverter: Inverter, vectors: np.ndarray) -> None:
    with pytest.raises(UnembedError, match="stream takes one vector, not 9; use invert"):
        next(inverter.stream(vectors))


def test_the_knobs_reach_the_strategy(inverter: Inverter, vectors: np.ndarray) -> None:
    for strategy, one, two in (
        ("euler-remask", {"remask": 0.0}, {"remask": 0.5}),
        ("two-stage", {"restart": 0.0}, {"restart": 1.0}),
        ("confidence", {"reveal": "linear"}, {"reveal": "cosine"}),
        ("beam", {"beams": 1}, {"beams": 4}),
        ("confidence", {"drafts": 2}, {"drafts": 5}),
    ):
        found = [inverter.invert(vectors, strategy, 6, seed=0, **knobs) for knobs in (one, two)]
        assert [f.ids for f in found[0]] != [f.ids for f in found[1]], strategy


@pytest.mark.parametrize("options", [{}, {"steps": 4}, {"strategy": "causal"}, {"guidance": 1.5}])
def test_several_drafts_give_the_same_answer_whatever_the_batch(
    inverter: Inverter, vectors: np.ndarray, options: dict[str, Any]
) -> None:
    options = {"drafts": 5, "seed": 1} | options
    whole = inverter.invert(vectors, **options)
    for size in (1, 4):
        parts = inverter.invert(vectors, batch_size=size, **options)
        assert [p.ids for p in parts] == [w.ids for w in whole]
        assert [p.forward_passes for p in parts] == [w.forward_passes for w in whole]
    halves = inverter.invert(vectors[:5], **options) + inverter.invert(vectors[5:], first=5, **options)
    assert [h.ids for h in halves] == [w.ids for w in whole]
    *_, last = inverter.stream(vectors[0], **options)
    (one,) = inverter.invert(vectors[0], **options)
    assert (last.ids, last.confidences) == (one.ids, one.confidences)
    assert last.index == last.total == (4 if "steps" in options else T)  # reading them is one of the steps


@pytest.mark.parametrize("options", [{"strategy": "beam"}, {"steps": 4, "drafts": 3, "seed": 1}])
def test_a_model_that_guesses_vectors_says_how_like_its_answer_is(
    vectors: np.ndarray, options: dict[str, Any]
) -> None:
    guessing = small_inverter(embeds=True, embed_share=0.1)
    found = guessing.invert(vectors, **options)
    for one, vector in zip(found, vectors, strict=True):
        text = torch.tensor([[*one.ids, guessing.tokenizer.end_id][:T]])
        guess = guessing.model.embed(text)[0].numpy()  # type: ignore[operator]
        assert one.likeness == pytest.approx(guess @ vector / np.linalg.norm(vector), abs=1e-5)
    parts = guessing.invert(vectors, batch_size=2, **options)
    assert [part.likeness for part in parts] == [one.likeness for one in found]
    *before, last = guessing.stream(vectors[0], **options)
    assert last.likeness == found[0].likeness
    assert all(step.likeness is None for step in before)


def test_where_nothing_is_guessed_there_is_no_likeness(inverter: Inverter, vectors: np.ndarray) -> None:
    guessing = small_inverter(embeds=True, embed_share=0.1)
    search: dict[str, Any] = {"encoder": FakeEncoder(), "rounds": 1, "candidates": 4, "refine": "encoder"}
    found = [
        *inverter.invert(vectors, "beam"),  # by a model that was not taught to
        *guessing.invert(vectors, "beam", guidance=0.0),  # blind to the vectors
        *guessing.invert(vectors, steps=4),  # single drafts
        *guessing.invert(vectors, "beam", **search),  # of which the cosine is known
    ]
    assert all(one.likeness is None for one in found)


def test_a_search_may_start_from_several_drafts(inverter: Inverter, vectors: np.ndarray) -> None:
    decoding: dict[str, Any] = {"steps": 4, "drafts": 6, "seed": 0}
    options: dict[str, Any] = {"encoder": FakeEncoder(), "rounds": 1, "candidates": 4, "pool": 2} | decoding
    plain = inverter.invert(vectors, **decoding)
    assert len({one.text for one in plain}) > 3
    first, *_ = inverter.search(vectors[0], **options)
    assert plain[0].text in [text for text, _ in first.pool]
    best = inverter.invert(vectors, refine="encoder", **options)
    assert all(b.forward_passes > p.forward_passes for b, p in zip(best, plain, strict=True))


def test_a_search_may_start_from_beams(inverter: Inverter, vectors: np.ndarray) -> None:
    options: dict[str, Any] = {"encoder": FakeEncoder(), "rounds": 1, "candidates": 4, "pool": 2, "seed": 0}
    (plain,) = inverter.invert(vectors[:1], "beam")
    first, *_ = inverter.search(vectors[0], strategy="beam", **options)
    assert plain.text in [text for text, _ in first.pool]
    (best,) = inverter.invert(vectors[:1], "beam", refine="encoder", **options)
    assert best.strategy == "beam" and best.forward_passes > plain.forward_passes


# There and back


def test_reconstruct_embeds_forgets_and_recovers(inverter: Inverter) -> None:
    encoder, texts = FakeEncoder(), ["The cat sat on the mat", "a dog ran"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = inverter.reconstruct(texts, encoder=encoder, steps=4)
    assert all(isinstance(f, Reconstruction) for f in found)
    assert [f.original for f in found] == texts == encoder.seen[:2]
    assert [f.inversion for f in found] == inverter.invert(FakeEncoder().encode(texts), steps=4)
    for f in found:
        one, two = FakeEncoder().encode([f.original, f.text])
        assert f.text == f.inversion.text
        assert f.cosine == pytest.approx(one @ two / np.linalg.norm(one) / np.linalg.norm(two), abs=1e-6)
    (alone,) = inverter.reconstruct(texts[1], encoder=encoder, steps=4)
    assert alone.original == texts[1]
    assert inverter.reconstruct([], encoder=encoder) == []


def test_a_long_text_is_cut_with_a_warning(inverter: Inverter) -> None:
    encoder = FakeEncoder()
    long = "the old red cat sat on the small mat under a roof"
    with pytest.warns(UserWarning, match=f"1 of 2 texts are longer than {T} tokens and were cut") as record:
        found = inverter.reconstruct([long, "a dog"], encoder=encoder)
    assert record[0].filename == __file__
    assert found[0].original == "the old red cat sat on the small" == encoder.seen[0]


def test_a_blank_text_is_refused(inverter: Inverter) -> None:
    with pytest.raises(UnembedError, match="text 1 is blank"):
        inverter.reconstruct(["a cat", "  "], encoder=FakeEncoder())


def test_an_encoder_of_another_size_is_refused(inverter: Inverter) -> None:
    with pytest.raises(UnembedError, match=f"encoder fake gives vectors of 5 numbers.*of fake, of {E}"):
        inverter.reconstruct(["a cat"], encoder=FakeEncoder(5))


def test_the_models_own_encoder_is_loaded_once(inverter: Inverter, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str, **options: Any) -> FakeEncoder:
        asked.append(name)
        return FakeEncoder()

    monkeypatch.setattr("unembed.encoders.load_encoder", load)
    monkeypatch.setattr(inverter, "_encoder", None)
    for _ in range(2):
        inverter.reconstruct("a cat")
    assert asked == ["fake"] == [inverter.encoder_name]


# Saved and loaded


@every_strategy
def test_a_saved_inverter_answers_the_same(
    inverter: Inverter, vectors: np.ndarray, tmp_path: Path, strategy: str
) -> None:
    inverter.save_pretrained(tmp_path / "model")
    for path in (tmp_path / "model", str(tmp_path / "model")):
        again = Inverter.from_pretrained(path, device="cpu")
        assert again.config == inverter.config and again.facts == inverter.facts
        assert (again.size, again.max_tokens, again.encoder_name) == (E, T, "fake")
        assert not again.model.training
        options: dict[str, Any] = {"strategy": strategy, "steps": 5, "seed": 0, "guidance": 1.5}
        assert again.invert(vectors, **options) == inverter.invert(vectors, **options)


def test_int8_is_a_quarter_and_close(inverter: Inverter, vectors: np.ndarray, tmp_path: Path) -> None:
    inverter.save_pretrained(tmp_path / "full")
    inverter.save_pretrained(tmp_path / "int8", int8=True)
    again = Inverter.from_pretrained(tmp_path / "int8")
    own = inverter.model.state_dict()
    for name, tensor in again.model.state_dict().items():
        step = own[name].abs().amax(-1, keepdim=True) / 127 if tensor.dim() == 2 else torch.zeros(1)
        assert ((tensor - own[name]).abs() <= step / 2 + 1e-6).all(), name
    found, known = again.invert(vectors), inverter.invert(vectors)
    same = sum(f.ids == k.ids for f, k in zip(found, known, strict=True))
    assert same >= 6  # of 9, for a model of random weights, whose choices are near ties
    assert "int8" in (tmp_path / "int8" / "README.md").read_text()
    assert "int8" not in (tmp_path / "full" / "README.md").read_text()


def test_saving_twice_replaces(inverter: Inverter, tmp_path: Path) -> None:
    for _ in range(2):
        inverter.save_pretrained(tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


class FakeHub:
    """Stands for `HfApi`: notes what was created, and what the uploaded folder held."""

    created: dict[str, Any] = {}
    uploaded: dict[str, Any] = {}

    def create_repo(self, repo_id: str, **options: Any) -> None:
        type(self).created = {"repo": repo_id, **options}

    def upload_folder(self, *, repo_id: str, folder_path: Path) -> str:
        type(self).uploaded = {"repo": repo_id, "files": {p.name for p in Path(folder_path).iterdir()},
                               "answer": Inverter.from_pretrained(folder_path)}  # fmt: skip
        return f"https://hub.invalid/{repo_id}"


@pytest.mark.parametrize("private", [True, False])
def test_push_to_hub_uploads_what_save_writes(
    inverter: Inverter, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch, private: bool
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", FakeHub)
    options = {} if private else {"private": False}  # private unless told otherwise
    assert inverter.push_to_hub("someone/inverter", **options) == "https://hub.invalid/someone/inverter"
    assert FakeHub.created == {"repo": "someone/inverter", "private": private, "exist_ok": True}
    assert FakeHub.uploaded["repo"] == "someone/inverter"
    assert FakeHub.uploaded["files"] == {
        "config.json", "facts.json", "README.md", "tokenizer.json", "tokens.json",
        "model-00001-of-00001.safetensors",
    }  # fmt: skip
    assert FakeHub.uploaded["answer"].invert(vectors) == inverter.invert(vectors)


def test_without_the_hubs_client_it_says_what_to_install(
    inverter: Inverter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnembedError, match=r"pip install 'unembed\[hub\]'"):
        inverter.push_to_hub("someone/inverter")
