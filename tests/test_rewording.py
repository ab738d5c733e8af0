"""rewording: lone words are written anew as the model thinks likely, untold the vector; all else stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from unembed import rewording
from unembed.backbone import build
from unembed.config import ModelConfig
from unembed.diffusion import chosen_places
from unembed.rewording import REWORDED, reword

T, SIZE, V = 8, 16, 53
PAD, END, MASK, NEW = 0, 1, 2, 27  # NEW opens a word, and no text has it
OPENERS, FOLLOWERS = range(3, 28), range(28, V)
OPENS = torch.tensor([token in OPENERS for token in range(V)])
CONFIG = ModelConfig(
    layers=1, hidden=32, heads=2, ffn=64, adaln_rank=0, time_conditioning=True, vocab_size=V, max_tokens=T,
    embedding_size=SIZE, mask_id=MASK, end_id=END, pad_id=PAD,
)  # fmt: skip


class Writer:
    """A model whose logits (B, T, V) are a function of the ids that it is shown; notes what it is asked."""

    config = CONFIG

    def __init__(self, logits: Callable[[Tensor], Tensor]) -> None:
        self.logits = logits
        self.shown: list[Tensor] = []
        self.asked: list[dict[str, Any]] = []
        self.places: list[int] = []

    def hidden(self, xt: Tensor, e: Tensor, **more: Any) -> Tensor:
        self.shown.append(xt)
        self.asked.append({"e": e, "learns": torch.is_grad_enabled(), **more})
        return self.logits(xt)

    def head(self, h: Tensor) -> Tensor:
        self.places.append(len(h))
        return h


def sure_of(answer: Callable[[Tensor], Tensor]) -> Writer:
    """Build a model that knows the one token (B, T) of each place."""
    return Writer(lambda xt: 1000.0 * (answer(xt)[..., None] == torch.arange(V, device=xt.device)))


def new_writer() -> Writer:
    """Build a model that only ever writes NEW, so that what is written shows."""
    return sure_of(lambda xt: torch.full_like(xt, NEW))


def fresh_model() -> Any:
    """Build a small denoiser with random weights."""
    torch.manual_seed(0)
    return build(CONFIG)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def texts(count: int, *, seed: int = 0, lone: float = 0.6, shortest: int = 1) -> Tensor:
    """Rows of random words, some begun inside one; a share `lone` of the tokens opens a word."""
    draw, shape = seeded(seed), (count, T)
    openers = torch.randint(OPENERS.start, NEW, shape, generator=draw)
    followers = torch.randint(FOLLOWERS.start, V, shape, generator=draw)
    ids = torch.where(torch.rand(shape, generator=draw) < lone, openers, followers)
    lengths = torch.randint(shortest, T + 1, (count, 1), generator=draw)
    places = torch.arange(T)
    return ids.masked_fill(places == lengths, END).masked_fill(places > lengths, PAD)


def lone_words(row: list[int]) -> set[int]:
    """Places of the words of one token: where one begins, and the next does or the text ends."""
    text = [token for token in row if token not in (END, PAD)]
    begins = {k for k, token in enumerate(text) if token in OPENERS}
    return {k for k in begins if k + 1 in {*begins, len(text)}}


def reworded(model: Any, ids: Tensor, *, share: float = 1.0, seed: int = 0) -> Tensor:
    """Let the model reword, and check that the ids it was given are as they were."""
    before = ids.clone()
    found = reword(model, ids, share=share, opens=OPENS, generator=seeded(seed))
    assert torch.equal(ids, before)
    assert (found.shape, found.dtype) == (ids.shape, ids.dtype)
    return found


def counted(ids: Tensor) -> Counter[tuple[int, ...]]:
    """How often each row is there."""
    return Counter(map(tuple, ids.tolist()))


# --- which words ----------------------------------------------------------------------------------


def test_a_row_by_hand() -> None:
    """Words of one token: at the front, in the middle, and before the end; not a first piece, nor a rest."""
    a, b, c = 3, 4, 28  # two that open a word and one that goes on with it
    rows = {
        (a, a, c, b, c, c, b, END): {0, 6},
        (c, a, a, c, a, b, END, PAD): {1, 4, 5},
        (a, b, c, a, b, c, c, a): {0, 3, 7},
        (b, END, PAD, PAD, PAD, PAD, PAD, PAD): {0},
        (a, b, PAD, PAD, PAD, PAD, PAD, PAD): {0, 1},
        (c, c, a, c, END, PAD, PAD, PAD): set(),
        (END, PAD, PAD, PAD, PAD, PAD, PAD, PAD): set(),
    }
    ids = torch.tensor(list(rows))
    found = [reworded(new_writer(), ids, seed=seed) == NEW for seed in range(80)]
    ever = torch.stack(found).any(0)
    assert [set(torch.where(row)[0].tolist()) for row in ever] == list(rows.values())
    assert [lone_words(list(row)) for row in rows] == list(rows.values())


def test_only_lone_words_are_written_anew() -> None:
    ids = texts(3000)
    found = reworded(new_writer(), ids)
    kinds, written = Counter[str](), Counter[str]()
    for before, after in zip(ids.tolist(), found.tolist(), strict=True):
        lone = lone_words(before)
        length = sum(token not in (END, PAD) for token in before)
        for place, (old, new) in enumerate(zip(before, after, strict=True)):
            assert new == old or (new == NEW and place in lone)
            if place in lone:
                kind = "first" if not place else "at the rim" if place == T - 1 else ""
                kind = kind or ("last" if place == length - 1 else "inner")
                kinds[kind] += 1
                written[kind] += new == NEW
    # Wherever a lone word stands, it is as likely to be written anew.
    assert set(kinds) == {"first", "at the rim", "last", "inner"}
    for kind, count in kinds.items():
        assert count > 200 and written[kind] / count == pytest.approx(REWORDED, abs=0.05), kind
    assert written.total() / kinds.total() == pytest.approx(REWORDED, abs=0.015)


def test_words_of_a_row_are_drawn_one_by_one() -> None:
    """Neither all of a row nor the same places of all rows."""
    found = reworded(new_writer(), texts(4000, lone=1.0, shortest=T)) == NEW
    counts = found.sum(1).float()
    assert float(counts.mean()) == pytest.approx(T * REWORDED, rel=0.03)
    assert float(counts.var()) == pytest.approx(T * REWORDED * (1 - REWORDED), rel=0.1)
    assert found.float().mean(0).tolist() == pytest.approx([REWORDED] * T, abs=0.03)


@pytest.mark.parametrize("end", [END, PAD], ids=["apart", "one"])
def test_lengths_ends_and_padding_stay(end: int) -> None:
    """Also where one token is both the end and the padding."""
    ids = texts(400).masked_fill_(texts(400) == END, end)
    model = fresh_model()
    model.config = ModelConfig(**{**vars(CONFIG), "end_id": end})
    found = reworded(model, ids)
    for token in (PAD, END):
        assert torch.equal(found == token, ids == token)
    assert not (found == MASK).any()
    changed = found != ids
    assert changed.any() and OPENS[found[changed]].all() and OPENS[ids[changed]].all()
    assert torch.equal(OPENS[found], OPENS[ids])  # words begin where they did


# --- which rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "share", "asked"), [(400, 1.0, 400), (400, 0.3, 120), (400, 0.01, 4), (7, 0.5, 4), (1, 1.0, 1)]
)
def test_the_model_is_shown_a_share_of_the_rows(count: int, share: float, asked: int) -> None:
    model, ids = new_writer(), texts(count)
    found = reworded(model, ids, share=share)
    (shown,) = model.shown
    assert len(shown) == asked
    # What it is shown is those rows, masked where it writes; all others are as they were.
    left = counted(found.masked_fill(found == NEW, MASK)) - counted(shown)
    assert left.total() == count - asked and left <= counted(ids)


def test_each_row_is_as_likely_as_any() -> None:
    ids = texts(10, lone=1.0, shortest=T)  # some word of a row is nearly always written anew
    chosen = torch.stack([(reworded(new_writer(), ids, share=0.4, seed=s) == NEW).any(1) for s in range(500)])
    assert chosen.float().mean(0).tolist() == pytest.approx([0.4 * (1 - (1 - REWORDED) ** T)] * 10, abs=0.08)
    assert chosen.sum(1).max() == 4
    assert len({tuple(torch.where(rows)[0].tolist()) for rows in chosen}) > 100


@pytest.mark.parametrize(("count", "share"), [(5, 0.0), (1, 0.3), (3, 0.1)])
def test_no_row_is_enough(count: int, share: float) -> None:
    """A small share of a small batch is no row at all, as a process of many may have it."""
    ids = texts(count)
    assert torch.equal(reworded(fresh_model(), ids, share=share), ids)


@pytest.mark.parametrize("length", [1, 3])
def test_short_rows(length: int) -> None:
    ids = texts(5, lone=1.0)[:, :length].contiguous()
    found = torch.cat([reworded(fresh_model(), ids, seed=seed) for seed in range(20)])
    assert (found != ids.repeat(20, 1)).any() and torch.equal(OPENS[found], OPENS[ids].repeat(20, 1))


@pytest.mark.parametrize("row", [[3, 28, 29, 4, 30, END, PAD, PAD], [28] * T, [END, *[PAD] * (T - 1)]])
def test_rows_without_a_lone_word_stay(row: list[int]) -> None:
    ids = torch.tensor([row] * 6)
    model = new_writer()
    assert torch.equal(reworded(model, ids), ids) and torch.equal(model.shown[0], ids)
    assert torch.equal(reworded(fresh_model(), ids), ids)


def test_nothing_is_written_where_no_token_tells_that_a_word_begins() -> None:
    ids = texts(40)
    found = reword(fresh_model(), ids, share=1.0, opens=torch.zeros_like(OPENS), generator=seeded())
    assert torch.equal(found, ids)


# --- what is written ------------------------------------------------------------------------------


def test_what_is_drawn_follows_the_model_among_what_opens_a_word() -> None:
    logits = 1.5 * torch.randn(V, generator=seeded(1))
    logits[~OPENS] += 20.0  # far likelier, but no word begins with them
    model = Writer(lambda xt: logits.expand(*xt.shape, V))
    ids = texts(8000, lone=1.0, shortest=T)
    found = reworded(model, ids)
    (shown,) = model.shown
    # Every word may be drawn for itself: count them all, less those that stayed.
    masked = int((shown == MASK).sum())
    stayed = torch.bincount(shown[shown != MASK], minlength=V)
    drawn = torch.bincount(found.flatten(), minlength=V) - stayed
    assert int(drawn.sum()) == masked > 18_000 and not drawn[~OPENS].any()
    expected = logits.masked_fill(~OPENS, -torch.inf).softmax(0)
    assert float((drawn / masked - expected).abs().sum() / 2) < 0.02
    # It is drawn, not chosen: the likeliest is not the only one.
    assert 0.1 < expected.max() < 0.5 and len(found.unique()) == len(OPENERS)


def test_an_unlikely_word_is_never_drawn() -> None:
    likely = torch.tensor([token in (5, 9) for token in range(V)])
    model = Writer(lambda xt: torch.where(likely, 0.0, -60.0).expand(*xt.shape, V))
    ids = texts(2000, lone=1.0)
    found = reworded(model, ids)
    assert set(found[found != ids].tolist()) == {5, 9}


@pytest.mark.parametrize("drawn", [0.0, 1.0])
def test_the_rarest_draws_write_a_word_too(drawn: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """At either end of what may be drawn the likeliest word is written, and never what is no word."""

    def rand(shape: int | tuple[int, ...], **_: Any) -> Tensor:
        shape = torch.Size([shape]) if isinstance(shape, int) else shape
        return torch.full(shape, drawn if shape[-1] == V else 0.0)

    model = Writer(lambda xt: (torch.arange(V) % (NEW + 1.0)).expand(*xt.shape, V))
    monkeypatch.setattr(torch, "rand", rand)
    assert reworded(model, torch.tensor([[3, 4, 28, 5, 6, END, PAD, PAD]])).tolist() == [
        [NEW, 4, 28, NEW, NEW, END, PAD, PAD]
    ]


def test_each_word_is_written_as_the_model_says_of_its_own_place() -> None:
    """What it says depends on the row and the place, so that none may be mistaken for another."""

    def answer(xt: Tensor) -> Tensor:
        return OPENERS.start + (xt.sum(1, keepdim=True) + 7 * torch.arange(T)) % len(OPENERS)

    model, ids = sure_of(answer), texts(500)
    found = reworded(model, ids, share=0.8)
    (shown,) = model.shown
    expected = counted(torch.where(shown == MASK, answer(shown), shown))
    left = counted(found) - expected
    assert left.total() == 100 and left <= counted(ids)  # nothing that was written is lost
    # Each row is still its own: no row got the words of another.
    changed = found != ids
    assert changed.any(1).sum() > 120
    for row, places in zip(ids.tolist(), changed, strict=True):
        assert set(torch.where(places)[0].tolist()) <= lone_words(row)


def test_a_surplus_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where more is masked than there is room for, the first are written and no mask is left."""
    ids = texts(40, lone=1.0)
    every = reworded(new_writer(), ids) == NEW
    monkeypatch.setattr(rewording, "chosen_places", lambda masked, count: chosen_places(masked, 5))
    found = reworded(new_writer(), ids)
    assert not (found == MASK).any() and int((found == NEW).sum()) == 5 < int(every.sum())
    assert every[found == NEW].all() and torch.equal(found[found != NEW], ids[found != NEW])


def test_there_is_room_for_all_and_little_more() -> None:
    """The logits have one shape, whatever is masked: all words alone is the most that can be."""
    for count in (1, 2, 8, 400):
        ids, model = texts(count, lone=1.0, shortest=T), new_writer()
        for seed in range(25):
            found = reworded(model, ids, seed=seed)
            assert int((found == NEW).sum()) == int((model.shown[-1] == MASK).sum())
        (room,) = set(model.places)
        assert room <= count * T
    assert room < 1.25 * REWORDED * 400 * T
    few = new_writer()
    reworded(few, texts(400, lone=0.2))
    assert few.places == [room]


# --- how the model is asked -----------------------------------------------------------------------


def test_the_model_is_asked_once_untold_the_vector_and_does_not_learn() -> None:
    model, ids = new_writer(), texts(50)
    with torch.enable_grad():
        reworded(model, ids, share=0.5)
        assert torch.is_grad_enabled()
    (asked,) = model.asked
    assert asked.keys() == {"e", "t", "drop", "learns"} and asked["learns"] is False
    assert asked["drop"].dtype == torch.bool and asked["drop"].tolist() == [True] * 25
    assert asked["e"].shape == (25, SIZE) and asked["e"].isfinite().all()
    # The time is that of so many masks.
    assert asked["t"].tolist() == pytest.approx([REWORDED] * 25)


def test_the_vector_has_no_say() -> None:
    ids, model = texts(200), fresh_model()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=seeded(p.numel())))
        found = reworded(model, ids)
        for name, p in model.projection.named_parameters():
            p.add_(1.0) if name != "null" else None
        assert torch.equal(reworded(model, ids), found)
        model.projection.null.neg_()  # this is what stands for it
        assert not torch.equal(reworded(model, ids), found)


@pytest.mark.parametrize("half", [False, True])
def test_a_model_stays_as_it_is(half: bool) -> None:
    model, ids = fresh_model(), texts(60)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        found = reworded(model, ids)
    assert not found.requires_grad and not torch.equal(found, ids)
    assert model.training and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_the_same_draws_write_the_same() -> None:
    """Nothing is drawn but by the generator that is given, and that is drawn on every time."""
    model, ids = fresh_model(), texts(60)
    state = torch.get_rng_state()
    found = [reworded(model, ids, seed=seed, share=0.5) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    generator = seeded()
    one, two = (reword(model, ids, share=0.5, opens=OPENS, generator=generator) for _ in range(2))
    assert torch.equal(one, found[0]) and not torch.equal(one, two)


# --- on a device ----------------------------------------------------------------------------------


class Noting(TorchDispatchMode):
    """Notes what is run; refuses what waits for a device, as reading a number of it does."""

    def __init__(self) -> None:
        super().__init__()
        self.run: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(function)
        assert not any(word in name for word in ("_local_scalar_dense", "nonzero", "masked_select", "unique"))
        if name.startswith("aten.index."):
            assert all(index is None or index.dtype == torch.int64 for index in args[1])
        self.run.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("wait", [lambda x: float(x.sum()), lambda x: x[x > 0], lambda x: x.nonzero()])
def test_waiting_is_noted(wait: Callable[[Tensor], Any]) -> None:
    with Noting(), pytest.raises(AssertionError):
        wait(torch.ones(3))


def test_no_device_is_waited_for_and_no_row_is_looped_over() -> None:
    model, runs = fresh_model(), []
    for count in (8, 200):
        ids, generator = texts(count), seeded()
        with Noting() as noted:
            reword(model, ids, share=0.5, opens=OPENS, generator=generator)
        runs.append(noted.run)
    assert runs[0] == runs[1] and len(runs[0]) > 20


def test_all_is_made_where_the_ids_are() -> None:
    """Where others are made is nowhere: what is made there cannot be used."""
    ids, expected = texts(30), reworded(new_writer(), texts(30))
    model, generator = new_writer(), seeded()
    with torch.device("meta"):
        found = reword(model, ids, share=1.0, opens=OPENS, generator=generator)
    assert torch.equal(found, expected)
    (asked,) = model.asked
    assert {asked[name].device.type for name in ("e", "t", "drop")} == {"cpu"}


def test_compiled_it_draws_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling is about speed alone; it is done once, and only where it is asked for."""
    compile, made = torch.compile, []

    def noted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        made.append(function)
        return compile(function, backend="eager")

    monkeypatch.setattr(torch, "compile", noted)
    rewording.compiled.cache_clear()
    torch.manual_seed(0)
    model = build(CONFIG)
    torch.nn.init.normal_(model.tokens.weight)
    ids = torch.randint(OPENERS[0], OPENERS[-1], (64, T))

    def drawn(**more: Any) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return reword(model, ids, share=0.5, opens=OPENS, generator=generator, **more)

    plain = drawn()
    assert not made and not plain.equal(ids)
    assert drawn(compile=True).equal(plain) and drawn(compile=True).equal(plain)
    assert made == [rewording.drawn_words]
    rewording.compiled.cache_clear()
