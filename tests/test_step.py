"""step: what the loss is asked for and what it is; draws that depend on seed and step alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from syllables import (
    ALONE,
    CONFIG,
    GUESSING,
    LEFT_TO_RIGHT,
    SIZE,
    FakeEncoder,
    T,
)
from torch import Tensor, nn

from unembed.backbone import build
from unembed.config import Config, DiffusionConfig
from unembed.corpus import PreparedData
from unembed.diffusion import causal_rows, embedded_rows
from unembed.pairs import CachedPairs, FreshSpans, Pairs, step_generator
from unembed.practice import write
from unembed.run import Group, Run
from unembed.step import masked_loss, practise, step_batch, train_step
from unembed.train import fit_to_data, open_pairs


def ask_step(run: Run, pairs: Pairs) -> dict[str, Any]:
    """Take a step and return what its loss was asked for."""
    asked: dict[str, Any] = {}

    def loss(
        model: Any, x0: Tensor, e: Tensor, t: Tensor, masked: Tensor, drop: Tensor, **more: Any
    ) -> Tensor:
        asked.update(more, x0=x0, t=t, masked=masked, drop=drop)
        return model.places.sum()

    train_step(run, pairs, loss)
    return asked


def test_the_average_does_not_remember_how_it_came_about(data: Path) -> None:
    """A graph behind it would grow with every step."""
    prepared = PreparedData.open(data)
    run = Run(fit_to_data(CONFIG, prepared), group=ALONE)
    pairs = CachedPairs(prepared, batch_size=CONFIG.train.batch_size, validation=8, seed=0, device="cpu")
    train_step(run, pairs, masked_loss)
    assert all(p.is_leaf and not p.requires_grad for p in run.average.parameters())


def test_training_follows_the_diffusion_settings(data: Path) -> None:
    """Without its vector a row is worth the null condition: nothing else of `e` may reach the loss."""
    prepared = PreparedData.open(data)
    dropped = fit_to_data(CONFIG.override(condition_dropout=1.0), prepared)
    assert dropped.diffusion == DiffusionConfig(condition_dropout=1.0)
    run = Run(dropped, group=ALONE)
    train_step(run, CachedPairs(prepared, batch_size=9, validation=8, seed=0, device="cpu"), masked_loss)
    state = run.optimizers[0].state
    moved = {
        name for name, p in run.model.named_parameters() if p in state and state[p]["exp_avg"].abs().max() > 0
    }
    assert "tokens.weight" in moved and not {"projection.w1.weight", "projection.w2.weight"} & moved


# --- the loss -------------------------------------------------------------------------------------


class Told(nn.Module):
    """A model that notes what it is told, and answers the same whatever that is."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Tensor] = []

    def hidden(self, xt: Tensor, e: Tensor, **_: Any) -> Tensor:
        self.told.append(xt)
        return torch.zeros(*xt.shape, 1)

    def head(self, h: Tensor) -> Tensor:
        return torch.linspace(-1, 1, 53).expand(len(h), 53)


def test_hidden_tokens_are_not_told_but_stay_targets() -> None:
    config = CONFIG.override(vocab_size=53, mask_id=2, end_id=1, pad_id=0, max_tokens=T, **LEFT_TO_RIGHT)
    draw = torch.Generator().manual_seed(0)
    x0 = torch.randint(3, 53, (6, T), generator=draw)
    x0[:, -1] = 0
    causal = torch.tensor([True, False] * 3)
    masked = torch.where(causal[:, None], x0 != 0, torch.rand(6, T, generator=draw) < 0.5)
    hidden = torch.rand(6, T, generator=draw) < 0.4
    model, ones = Told(), torch.ones(6)
    losses = [
        masked_loss(
            model, x0, ones, ones, masked, ones > 1, config=config, count=int(masked.sum()), causal=causal,
            hidden=given,
        )
        for given in (hidden, None)
    ]  # fmt: skip
    told, plain = model.told
    assert torch.equal(told == 2, torch.where(causal[:, None], hidden, masked))
    assert torch.equal(told[told != 2], x0[told != 2])
    assert torch.equal(plain[causal], x0[causal]) and torch.equal(plain[~causal], told[~causal])
    # The model answers the same to both, so the loss is the same: that of every token of a causal row.
    assert losses[0] == losses[1]
    wanted = -torch.linspace(-1, 1, 53).log_softmax(0)[x0[masked]].sum()
    torch.testing.assert_close(losses[0], wanted)


def guessing_config(**changes: Any) -> Config:
    """Settings of a model for the data that reads left to right and guesses vectors, without the data."""
    config = CONFIG.override(vocab_size=53, mask_id=2, end_id=1, pad_id=0, max_tokens=T, embedding_size=SIZE)
    return config.override(**LEFT_TO_RIGHT, **GUESSING, time_conditioning=True, **changes)


@torch.no_grad()
@pytest.mark.parametrize("weight", ["mean", "elbo", "inverse-t"])
def test_of_a_whole_row_the_vector_is_the_target_and_no_token_is(weight: str) -> None:
    draw = torch.Generator().manual_seed(0)
    x0 = torch.randint(3, 53, (6, T), generator=draw)
    x0[torch.arange(T) >= torch.tensor([[8], [3], [5], [1], [6], [8]])] = 0
    e, t = torch.randn(6, SIZE, generator=draw), torch.rand(6, generator=draw)
    whole = torch.tensor([True, True, False, True, False, False])
    causal = torch.tensor([False, False, True, False, False, True])
    masked = torch.where(causal[:, None], x0 != 0, torch.rand(6, T, generator=draw) < 0.5)
    masked, t, drop = masked & ~whole[:, None], t.masked_fill(whole, 0.0), torch.arange(6) == 4
    torch.manual_seed(0)
    model: Any = build(guessing_config().model)
    for p in model.parameters():
        p.add_(torch.randn(p.shape, generator=draw) * 0.1)

    def loss(rows: Tensor, *, vectors: Tensor = e, asked: bool = True, **changes: Any) -> Tensor:
        more = {"whole": whole[rows]} if asked else {}
        return masked_loss(
            model, x0[rows], vectors[rows], t[rows], masked[rows], drop[rows], causal=causal[rows],
            config=guessing_config(weight=weight, **changes), count=int(masked[rows].sum()), **more,
        )  # fmt: skip

    every = torch.ones(6, dtype=torch.bool)
    others = loss(~whole, asked=False)
    assert others > 1
    torch.testing.assert_close(loss(every, embed_weight=0.0), others)
    torch.testing.assert_close(loss(~whole), others)
    # What is added is how far each guess is from the vector's direction, whatever the text's length.
    apart = (model.embed(x0[whole]) - F.normalize(e[whole], dim=1)).norm(dim=1)
    wanted = 3.0 * T * apart.sum()
    torch.testing.assert_close(loss(every, embed_weight=3.0) - others, wanted, rtol=1e-4, atol=1e-4)
    # It is not told: what is guessed is the same, so that its opposite is as far as the other side.
    turned = torch.where(whole[:, None], -e, e)
    apart = (model.embed(x0[whole]) + F.normalize(e[whole], dim=1)).norm(dim=1)
    wanted = 3.0 * T * apart.sum()
    found = loss(every, vectors=turned, embed_weight=3.0) - others
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


# --- the noise ------------------------------------------------------------------------------------


def test_a_share_of_the_tokens_is_hidden_in_every_step(data: Path) -> None:
    prepared = PreparedData.open(data)
    pairs = CachedPairs(prepared, batch_size=40, validation=8, seed=0, device="cpu")

    def ask(step: int, **changes: Any) -> dict[str, Any]:
        config = fit_to_data(CONFIG.override(batch_size=40, **{**LEFT_TO_RIGHT, **changes}), prepared)
        run = Run(config, group=ALONE)
        run.step = step
        return ask_step(run, pairs)

    shares = {share: ask(3, causal_hidden=share) for share in (0.0, 0.3, 1.0)}
    for share, asked in shares.items():
        assert float(asked["hidden"].float().mean()) == pytest.approx(share, abs=0.1)
        # Nothing else depends on it: neither what is masked nor what is asked for.
        for name in ("t", "masked", "drop", "causal", "count"):
            assert torch.equal(*(torch.as_tensor(each[name]) for each in (asked, shares[0.0]))), name
    causal = shares[0.3]["causal"]
    assert int(causal.sum()) == 20
    assert torch.equal(shares[0.3]["masked"][causal], shares[0.3]["x0"][causal] != 0)
    assert torch.equal(ask(3, causal_hidden=0.3)["hidden"], shares[0.3]["hidden"])
    assert not torch.equal(ask(4, causal_hidden=0.3)["hidden"], shares[0.3]["hidden"])
    assert "hidden" not in ask(3, causal_share=0.0)


@pytest.mark.parametrize("causal", [0.0, 0.5])
def test_a_share_of_the_rows_is_whole_in_every_step(causal: float, data: Path) -> None:
    prepared = PreparedData.open(data)
    pairs = CachedPairs(prepared, batch_size=40, validation=8, seed=0, device="cpu")
    left = {**LEFT_TO_RIGHT, "causal_share": causal}

    def ask(**changes: Any) -> dict[str, Any]:
        run = Run(fit_to_data(CONFIG.override(batch_size=40, **left, **changes), prepared), group=ALONE)
        return ask_step(run, pairs)

    plain, asked = ask(), ask(**GUESSING)
    assert "whole" not in plain and int(asked["whole"].sum()) == 10
    whole, config = asked["whole"], CONFIG.override(**left, **GUESSING).diffusion
    assert torch.equal(whole, embedded_rows(40, config, device="cpu"))
    assert not (whole & causal_rows(40, config, device="cpu")).any()
    # There nothing is masked; to the other rows, and to what is drawn, it makes no difference.
    assert not asked["masked"][whole].any() and not asked["t"][whole].any()
    for name in ("t", "masked"):
        assert torch.equal(asked[name][~whole], plain[name][~whole]), name
    for name in ("x0", "drop", *(["causal", "hidden"] if causal else [])):
        assert torch.equal(asked[name], plain[name]), name
    assert asked["count"] == int(asked["masked"].sum()) < plain["count"]


@pytest.mark.parametrize(("share", "more"), [(0.0, {}), (0.5, {}), (0.0, GUESSING)])
def test_compiled_steps_have_room_for_all_targets_and_little_more(
    share: float, more: dict[str, Any], passages: Path
) -> None:
    """Logits of a compiled step have one shape, so that it is compiled once: it must do for every batch."""
    prepared, B = PreparedData.open(passages), 6000
    config = CONFIG.override(
        batch_size=B, compile=True, pairs="fresh", splice_share=share, **LEFT_TO_RIGHT, **more
    )
    run = Run(fit_to_data(config, prepared), group=ALONE)
    pairs = FreshSpans(
        prepared, encoder=FakeEncoder(), batch_size=B, validation=8, seed=0, device="cpu", splice_share=share
    )
    counts, targets = set(), []
    for run.step in range(20):
        asked = ask_step(run, pairs)
        counts.add(asked["count"])
        targets.append(int(asked["masked"].sum()))
    (count,) = counts
    assert max(targets) <= count < 1.03 * max(targets) and count % 512 == 0


# --- dropout --------------------------------------------------------------------------------------


def test_a_step_with_dropout_depends_on_seed_and_step_alone(data: Path) -> None:
    prepared = PreparedData.open(data)
    pairs = CachedPairs(prepared, batch_size=9, validation=8, seed=0, device="cpu")

    def loss(dropout: float, *, drawn: int = 0) -> float:
        run = Run(fit_to_data(CONFIG.override(dropout=dropout), prepared), group=ALONE)
        torch.rand(drawn)  # by others, before
        return float(train_step(run, pairs, masked_loss))

    assert loss(0.3) == loss(0.3, drawn=9) != loss(0.0)


def test_dropout_draws_anew_in_every_step_and_process(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = PreparedData.open(data)
    pairs = CachedPairs(prepared, batch_size=9, validation=8, seed=0, device="cpu")
    run = Run(fit_to_data(CONFIG.override(dropout=0.3), prepared), group=ALONE)
    drawn = []

    def loss(model: Any, *_: Any, **__: Any) -> Tensor:
        drawn.append(float(torch.rand(())))
        return model.places.sum()

    monkeypatch.setattr(Group, "rows", lambda group, size: slice(size))  # no second process is there
    for step, rank in ((0, 0), (1, 0), (0, 1)):
        run.step, run.group = step, Group(rank, 1, torch.device("cpu"))
        train_step(run, pairs, loss)
    assert len(set(drawn)) == 3


# --- rewording ------------------------------------------------------------------------------------


def rewording_run(prepared: PreparedData, *, group: Group = ALONE, **changes: Any) -> Run:
    """Begin a run in which the model rewords all rows, or as many as is said."""
    values = {"pairs": "fresh", "batch_size": 40, "reword_share": 1.0, **changes}
    return Run(fit_to_data(CONFIG.override(**values), prepared), group=group)


def spans_of(prepared: PreparedData, **changes: Any) -> FreshSpans:
    """Open the passages for the batches of such a run."""
    values = {"encoder": FakeEncoder(), "batch_size": 40, "validation": 8, "seed": 0, "device": "cpu"}
    return FreshSpans(prepared, **{**values, **changes})


def content(ids: Tensor) -> Tensor:
    """Tokens of each row before its end."""
    return (ids > 1).sum(1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("swap_share", [0.0, 1.0])
def test_texts_are_reworded_before_they_are_embedded(
    swap_share: float, compiled: bool, passages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = PreparedData.open(passages)
    run, spans = rewording_run(prepared), spans_of(prepared, swap_share=swap_share)
    if compiled:  # as fast as without
        monkeypatch.setattr(spans, "_compiled", spans.encoder.encode_ids)
    plain, _ = spans.batch(run.step, slice(None))
    # The words are written into the very texts of this step, whose words are swapped by then.
    given: list[Tensor] = []

    def note(ids: Tensor) -> Tensor:
        given.append(ids)
        return ids

    assert torch.equal(spans.batch(run.step, slice(3, 30), note)[0], plain[3:30])
    assert len(given) == 1 and torch.equal(given[0], plain[3:30])
    x0, e = step_batch(run, spans, slice(None))
    assert torch.equal(content(x0), content(plain))
    changed = x0 != plain
    assert 0.05 < changed.float().mean() < 0.3 and spans.opens[x0[changed]].all()
    # The vectors are those of what was written, which is what training is told.
    torch.testing.assert_close(e, FakeEncoder().encode_ids(x0, content(x0)))
    told: list[Tensor] = []

    def loss(model: Any, *given: Any, **more: Any) -> Tensor:
        told.extend(given[:2])
        return model.places.sum()

    train_step(run, spans, loss)
    assert torch.equal(told[0], x0) and torch.equal(told[1], e)


def test_rewording_follows_the_weights_as_they_are_learnt(passages: Path) -> None:
    """It is the model of this step that writes, not the one of the beginning, nor the average."""
    prepared = PreparedData.open(passages)
    run, spans = rewording_run(prepared), spans_of(prepared)
    plain, _ = spans.batch(0, slice(None))
    with torch.no_grad():
        run.model.bias[7] = 100.0  # type: ignore[operator]
    x0, _ = step_batch(run, spans, slice(None))
    assert set(x0[x0 != plain].tolist()) == {7}


def test_rewording_is_drawn_anew_for_every_seed_step_and_process(
    passages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = PreparedData.open(passages)
    spans, asked = spans_of(prepared), []

    def note(model: Any, ids: Tensor, **more: Any) -> Tensor:
        asked.append((model, {**more, "half": torch.is_autocast_enabled("cpu")}))
        return ids

    monkeypatch.setattr("unembed.step.reword", note)
    seeds: list[int] = []
    for seed in range(3):
        for rank in range(3):
            group = Group(rank, 3, torch.device("cpu"))
            precision = "bf16" if rank else "fp32"
            run = rewording_run(prepared, group=group, seed=seed, reword_share=0.4, precision=precision)
            for run.step in range(4):
                step_batch(run, spans, slice(None))
                model, more = asked.pop()
                assert model is run.model and more["share"] == 0.4 and more["opens"] is spans.opens
                assert more["half"] == (precision == "bf16")
                seeds.append(more["generator"].initial_seed())
    others = {
        step_generator(seed, step, stream=stream).initial_seed()
        for seed in range(3)
        for step in range(4)
        for stream in range(20)
    }
    assert len(set(seeds)) == len(seeds) == 36 and not others & set(seeds)


def test_rewording_does_not_know_of_the_steps_before(passages: Path) -> None:
    """What torch's own generator has drawn before is another thing after a stop."""
    prepared = PreparedData.open(passages)
    run, spans = rewording_run(prepared, dropout=0.5), spans_of(prepared)
    with torch.no_grad():
        for p in run.model.parameters():
            p.mul_(10.0)  # so that it matters what is dropped
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(ask_step(run, spans)["x0"])
    assert torch.equal(found[0], found[1])
    assert run.model.training  # in the step itself much is dropped


def test_without_a_share_nothing_is_reworded(passages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = PreparedData.open(passages)
    spans = spans_of(prepared)
    monkeypatch.delattr("unembed.step.reword")
    run = rewording_run(prepared, reword_share=0.0)
    assert torch.equal(ask_step(run, spans)["x0"], spans.batch(0, slice(None))[0])


@pytest.mark.parametrize("share", ["splice_share", "swap_share", "rare_share", "reword_share"])
def test_cached_pairs_stay_as_they_are(share: str, data: Path) -> None:
    """Their vectors were computed beforehand."""
    prepared = PreparedData.open(data)
    batches = []
    for value in (0.0, 1.0):
        config = fit_to_data(CONFIG.override(**{share: value}), prepared)
        batches.append(ask_step(Run(config, group=ALONE), open_pairs(config, prepared, ALONE)))
    assert all(torch.equal(batches[0][name], batches[1][name]) for name in ("x0", "masked", "t", "drop"))


# --- practice -------------------------------------------------------------------------------------


def practice_run(prepared: PreparedData, *, group: Group = ALONE, **changes: Any) -> Run:
    """Begin a run that practises on some rows."""
    values = {**LEFT_TO_RIGHT, "practice_share": 0.5, "learning_rate": 1e-3, **changes}
    return Run(fit_to_data(CONFIG.override(**values), prepared), group=group)


def practice_gradients(run: Run, pairs: Pairs) -> dict[str, Tensor]:
    """What practice alone asks of the weights in this step."""
    run.model.zero_grad()
    practise(run, pairs, *step_batch(run, pairs, slice(None)))
    return {name: p.grad.clone() for name, p in run.model.named_parameters() if p.grad is not None}


def test_practice_adds_to_what_a_step_learns(data: Path) -> None:
    prepared = PreparedData.open(data)
    moved = []
    for weight in (0.0, 5.0):
        run = practice_run(prepared, practice_weight=weight)
        train_step(run, open_pairs(run.config, prepared, ALONE), masked_loss)
        moved.append(run.model.state_dict())
    plain = practice_run(prepared, practice_share=0.0)
    train_step(plain, open_pairs(plain.config, prepared, ALONE), masked_loss)
    assert all(torch.equal(moved[0][name], value) for name, value in plain.model.state_dict().items())
    assert any(not torch.equal(moved[0][name], value) for name, value in moved[1].items())


def test_practice_is_on_a_share_of_the_rows(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, asked = PreparedData.open(data), []

    def note(model: Any, e: Tensor, **more: Any) -> Tensor:
        asked.append((model, e))
        return write(model, e, **more)

    monkeypatch.setattr("unembed.step.write", note)
    for share, rows in ((0.01, 1), (0.5, 6), (1.0, 12)):
        run = practice_run(prepared, practice_share=share, batch_size=12)
        pairs = open_pairs(run.config, prepared, ALONE)
        train_step(run, pairs, masked_loss)
        model, e = asked.pop()
        assert model is run.model and torch.equal(e, pairs.batch(0, slice(None))[1][:rows])


def test_practice_is_drawn_anew_for_every_seed_step_and_process(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, seeds = PreparedData.open(data), []

    def note(model: Any, e: Tensor, *, generator: torch.Generator, compile: bool) -> Tensor:
        seeds.append(generator.initial_seed())
        return write(model, e, generator=generator, compile=compile)

    monkeypatch.setattr("unembed.step.write", note)
    monkeypatch.setattr(Group, "rows", lambda group, size: slice(size))  # no second process is there
    for seed in range(2):
        for rank in range(2):
            run = practice_run(prepared, group=Group(rank, 1, torch.device("cpu")), seed=seed)
            pairs = open_pairs(run.config, prepared, ALONE)
            for run.step in range(2):
                practice_gradients(run, pairs)
    assert len(set(seeds)) == 8


def test_practice_does_not_depend_on_how_many_targets_are_bounded(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where shapes are fixed, places behind a text's end come along; they are worth nothing."""
    prepared = PreparedData.open(data)
    run = practice_run(prepared)
    pairs = open_pairs(run.config, prepared, ALONE)
    exact = practice_gradients(run, pairs)
    monkeypatch.setattr("unembed.step.chosen_places", lambda wanted, count: torch.arange(wanted.numel()))
    for name, gradient in practice_gradients(run, pairs).items():
        torch.testing.assert_close(gradient, exact[name], atol=1e-5, rtol=1e-4)
