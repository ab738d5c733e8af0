"""The network: shapes, conditioning, and what must not matter."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unembed.config import ModelConfig, Positions
from unembed.model import Denoiser, Modulation, attend, parameter_counts, place_turns, rotate

B, T, V, E = 3, 10, 40, 12
MASK = 4
CONFIG = ModelConfig(
    layers=2, hidden=32, heads=4, ffn=48, max_tokens=T, vocab_size=V, mask_id=MASK, end_id=1, pad_id=0,
    embedding_size=E, adaln_rank=0,
)  # fmt: skip
OTHERS = torch.arange(V) != MASK


def perturbed(**changes: Any) -> Denoiser:
    """Return a model whose every weight has moved off its first value, as training would do."""
    torch.manual_seed(0)
    model = Denoiser(dataclasses.replace(CONFIG, **changes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def inputs(rows: int = B, length: int = T) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(0, V, (rows, length), generator=draw), torch.randn(rows, E, generator=draw)


def gap(one: Tensor, two: Tensor) -> float:
    """Largest difference over the tokens that can be predicted."""
    return float((one - two)[..., OTHERS].abs().max())


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("length", [1, 4, T])
@pytest.mark.parametrize("time_conditioning", [True, False])
def test_shapes(length: int, time_conditioning: bool) -> None:
    model = perturbed(time_conditioning=time_conditioning)
    xt, e = inputs(length=length)
    t = torch.rand(B)
    assert model.hidden(xt, e, t=t).shape == (B, length, 32)
    logits = model(xt, e, t=t)
    assert logits.shape == (B, length, V)
    assert logits[..., OTHERS].isfinite().all()
    assert (logits[..., MASK] == -torch.inf).all()
    assert (logits.softmax(-1)[..., MASK] == 0).all()


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_where_is_a_gather(share: float) -> None:
    model = perturbed()
    xt, e = inputs()
    where = torch.rand(B, T, generator=torch.Generator().manual_seed(2)) < share
    logits = model(xt, e, where=where)
    assert logits.shape == (int(where.sum()), V)
    torch.testing.assert_close(logits, model(xt, e)[where])


def test_fresh_modulations_are_zero() -> None:
    model = Denoiser(dataclasses.replace(CONFIG, time_conditioning=True, adaln_diagonal=True))
    modulations = [m for m in model.modules() if isinstance(m, Modulation)]
    assert [m.chunks for m in modulations] == [6, 6, 2]
    for m in modulations:
        chunks = m(torch.randn(B, 32), torch.rand(B))
        assert all(c.shape == (B, 1, 32) and (c == 0).all() for c in chunks)
    xt, e = inputs()
    assert gap(model(xt, e), model(xt, -e)) == 0  # so a fresh model cannot see its vector yet


def test_modulations_learn_from_the_first_step() -> None:
    config = dataclasses.replace(CONFIG, adaln_rank=4, adaln_diagonal=True, time_conditioning=True)
    model = Denoiser(config)
    xt, e = inputs()
    with torch.enable_grad():
        model(xt, e, t=torch.rand(B))[..., OTHERS].square().sum().backward()
    learning = ("modulation.up", "modulation.diagonal", "modulation.time")
    grads = {n: p.grad for n, p in model.named_parameters() if any(part in n for part in learning)}
    assert len(grads) == 3 * 5
    assert all(g is not None and g.abs().max() > 0 for g in grads.values())


def test_changing_the_vector_changes_the_output() -> None:
    model = perturbed()
    xt, e = inputs()
    for row in range(B):
        other = e.clone()
        other[row] = -other[row]
        change = (model(xt, e) - model(xt, other))[..., OTHERS].abs().amax((1, 2))
        assert change[row] > 1e-2
        assert change[torch.arange(B) != row].max() < 1e-5


def test_dropping_the_vector_gives_the_null_condition() -> None:
    model = perturbed()
    xt, e = inputs()
    drop = torch.tensor([True, False, True])
    one, two = model(xt, e, drop=drop), model(xt, e + 1, drop=drop)
    assert gap(one[drop], two[drop]) == 0
    assert gap(one[~drop], two[~drop]) > 1e-2
    assert gap(one[~drop], model(xt, e)[~drop]) < 1e-5
    assert gap(one[drop], model(xt, e)[drop]) > 1e-2
    model.projection.null.add_(1)
    assert gap(one[drop], model(xt, e, drop=drop)[drop]) > 1e-2


@pytest.mark.parametrize("scale", [1e-3, 7.0, 1e4])
def test_length_of_the_vector_does_not_matter(scale: float) -> None:
    model = perturbed()
    xt, e = inputs()
    assert gap(model(xt, e), model(xt, e * scale)) < 1e-5


def test_time() -> None:
    xt, e = inputs()
    early, late = torch.full((B,), 0.1), torch.full((B,), 0.9)
    aware, blind = perturbed(time_conditioning=True), perturbed(time_conditioning=False)
    assert gap(aware(xt, e, t=early), aware(xt, e, t=late)) > 1e-2
    assert gap(blind(xt, e, t=early), blind(xt, e, t=late)) == 0
    assert gap(blind(xt, e, t=early), blind(xt, e)) == 0


def test_rotary_positions_are_relative() -> None:
    draw = torch.Generator().manual_seed(3)
    q, k = torch.randn(8, generator=draw), torch.randn(8, generator=draw)
    turned_q, turned_k = (rotate(x.expand(T, 8), place_turns(T, 8)) for x in (q, k))
    torch.testing.assert_close(turned_q[0], q)
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(T))
    scores = turned_q @ turned_k.T
    for shift in range(-T + 1, T):
        diagonal = scores.diagonal(shift)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4, rtol=0)
    assert (scores[0] - scores[0, 0]).abs()[1:].max() > 0.1


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_attention_knows_places_only_if_rotary(positions: Positions) -> None:
    torch.manual_seed(0)
    model = Denoiser(dataclasses.replace(CONFIG, positions=positions))
    attention: Any = model.blocks[0].attention
    x = torch.randn(1, T, 32)
    order = torch.randperm(T)
    moved = float(
        (attention(x, model.turns, None)[:, order] - attention(x[:, order], model.turns, None)).abs().max()
    )
    assert (moved > 1e-3) == (positions == "rotary")


def test_attention_is_the_same_by_the_formula_and_by_the_kernel() -> None:
    q, k, v = torch.randn((3, 2, 4, T, 8), generator=torch.Generator().manual_seed(0)).unbind()
    formula = torch.compile(attend, backend="eager", fullgraph=True)(q, k, v)
    torch.testing.assert_close(formula, attend(q, k, v), rtol=1e-5, atol=1e-5)


def test_causal_rows_see_only_what_stands_before() -> None:
    model = perturbed(causal=True)
    xt, e = inputs()
    causal = torch.tensor([True] * B)
    changed = xt.clone()
    changed[:, 4] = 9
    moved = (model.hidden(xt, e, causal=causal) - model.hidden(changed, e, causal=causal)).abs().amax((0, 2))
    assert (moved[:5] == 0).all() and (moved[5:] > 1e-4).all()


def test_causal_rows_and_others_share_a_batch() -> None:
    model = perturbed(causal=True)
    xt, e = inputs()
    every = model.hidden(xt, e, causal=torch.tensor([True] * B))
    mixed = model.hidden(xt, e, causal=torch.tensor([True, False, True]))
    torch.testing.assert_close(mixed[0], every[0])
    torch.testing.assert_close(mixed[1], model.hidden(xt, e)[1])


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("pieces", [[T], [1] * T, [4, 1, 5], [1, 9]])
def test_places_read_one_after_the_other_are_those_of_the_whole_row(
    pieces: list[int], positions: Positions
) -> None:
    model = perturbed(causal=True, positions=positions, time_conditioning=True)
    (xt, e), t = inputs(), torch.rand(B)
    wanted = model.hidden(xt, e, t=t, causal=torch.tensor([True] * B))
    condition = model.condition(e)
    cache = model.cache(condition)
    for where in torch.arange(T).expand(B, T).split(pieces, dim=1):
        found = model.read(xt, where, t=t, condition=condition, cache=cache)
        torch.testing.assert_close(found, wanted[:, where[0]])


def test_rows_are_read_at_their_own_pace() -> None:
    model = perturbed(causal=True)
    xt, e = inputs()
    wanted = model.hidden(xt, e, causal=torch.tensor([True] * B))
    condition = model.condition(e)
    cache = model.cache(condition)
    masked = xt.clone()
    for row, length in enumerate(pace := torch.tensor([6, 0, 3])):
        masked[row, length:] = MASK
    model.read(masked, torch.arange(T).expand(B, T), condition=condition, cache=cache)
    for step in range(T - 6):  # what was read of masks is forgotten
        where = pace[:, None] + step
        found = model.read(xt, where, condition=condition, cache=cache)
        torch.testing.assert_close(found[:, 0], wanted[torch.arange(B), where[:, 0]])


def texts(lengths: tuple[int, ...] = (3, 1, 7)) -> Tensor:
    """Ids of texts of so many tokens, with padding behind them."""
    ids = torch.randint(5, V, (len(lengths), T), generator=torch.Generator().manual_seed(2))
    return ids.masked_fill(torch.arange(T) >= torch.tensor(lengths)[:, None], CONFIG.pad_id)


@pytest.mark.parametrize("changes", [{}, {"positions": "learned", "adaln_rank": 4, "adaln_diagonal": True}])
def test_padding_behind_a_text_does_not_change_what_vector_is_guessed(changes: dict[str, Any]) -> None:
    model, ids = perturbed(embeds=True, time_conditioning=True, **changes), texts()
    guesses = model.embed(ids)
    assert guesses.shape == (B, E)
    torch.testing.assert_close(guesses.norm(dim=1), torch.ones(B))
    for row, length in enumerate((3, 1, 7)):
        for size in range(length, T + 1):  # nor do the texts beside it
            torch.testing.assert_close(model.embed(ids[row : row + 1, :size])[0], guesses[row])


def test_a_guess_depends_on_every_token_and_on_their_order() -> None:
    model, ids = perturbed(embeds=True), texts((7,))
    guess = model.embed(ids)
    for place in range(7):
        other = ids.clone()
        other[0, place] = 5 + (other[0, place] - 4) % (V - 5)
        assert (model.embed(other) - guess).abs().max() > 1e-3
    assert (model.embed(ids[:, [1, 0, *range(2, T)]]) - guess).abs().max() > 1e-3


def test_the_vector_of_a_whole_row_is_not_told() -> None:
    model, ids = perturbed(embeds=True, causal=True, time_conditioning=True), texts()
    e, t = inputs()[1], torch.rand(B)
    whole, causal = torch.tensor([True, False, False]), torch.tensor([False, False, True])
    kinds: tuple[dict[str, Any], ...] = ({}, {"causal": causal})
    for more in kinds:
        mixed = model.hidden(ids, e, t=t, whole=whole, **more)
        other = model.hidden(ids, -e, t=t, whole=whole, drop=whole, **more)
        assert torch.equal(mixed[0], other[0])
        assert (mixed - other)[1:].abs().amax((1, 2)).min() > 1e-2
        # Those beside it are as they would be without it, padding and all.
        torch.testing.assert_close(mixed[1:], model.hidden(ids, e, t=t, **more)[1:])
    assert all(torch.equal(part[0], again[0]) for part, again in zip(
        model.condition(e, whole=whole), model.condition(-e, whole=whole), strict=True
    ))  # fmt: skip


def test_guesses_are_read_off_whole_rows_at_time_zero() -> None:
    model, ids = perturbed(embeds=True, time_conditioning=True), texts()
    rows, e = torch.ones(B, dtype=torch.bool), inputs()[1]
    h = model.hidden(ids, e, t=torch.zeros(B), whole=rows)
    torch.testing.assert_close(model.vectors(h, ids), model.embed(ids))
    late = model.hidden(ids, e, t=torch.ones(B), whole=rows)
    assert (model.vectors(late, ids) - model.embed(ids)).abs().max() > 1e-3
    before = model.embed(ids)
    model.projection.null.add_(1)
    assert torch.equal(model.embed(ids), before)
    model.whole.add_(1)
    assert (model.embed(ids) - before).abs().max() > 1e-3


def test_guesses_are_the_same_by_the_formula_and_by_the_kernel() -> None:
    model, ids = perturbed(embeds=True), texts()
    by_formula = torch.compile(model.embed, backend="eager")(ids)
    torch.testing.assert_close(by_formula, model.embed(ids), rtol=1e-5, atol=1e-5)


def test_what_guesses_is_all_that_is_added() -> None:
    plain, more = (Denoiser(dataclasses.replace(CONFIG, embeds=embeds)) for embeds in (False, True))
    names, all_names = plain.state_dict().keys(), more.state_dict().keys()
    assert names < all_names and all_names - names == {"whole", "vector.weight", "vector.bias"}
    assert parameter_counts(more)[0] - parameter_counts(plain)[0] == 32 + 32 * E + E
    assert not more.embeds  # before it was taught


def test_dropout_acts_in_training_only() -> None:
    plain, model = perturbed(), perturbed(dropout=0.5)
    xt, e = inputs()
    wanted = plain(xt, e)
    assert gap(model(xt, e), wanted) == 0
    model.train()
    one, two = model(xt, e), model(xt, e)
    assert gap(one, two) > 1e-2 and gap(one, wanted) > 1e-2
    torch.manual_seed(7)
    three = model(xt, e)
    torch.manual_seed(7)
    assert gap(model(xt, e), three) == 0
    state = torch.get_rng_state()
    assert (
        gap(plain.train()(xt, e), wanted) == 0
    )  # without dropout, training is no other pass and draws nothing
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_leaves_out_a_share_of_what_both_sub_layers_add() -> None:
    model = perturbed(dropout=0.25)
    block: Any = model.blocks[0].train()
    x, known = torch.randn(1, T, 32), model.condition(inputs()[1][:1])[0]
    for silent in (block.down, block.attention.out):  # so that the other is heard alone
        weight = silent.weight.clone()
        silent.weight.zero_()
        added = torch.stack([block(x, known, None, model.turns) - x for _ in range(400)])
        whole = block.eval()(x, known, None, model.turns) - x
        block.train()
        assert (added == 0).float().mean() == pytest.approx(0.25, abs=0.01)
        left = added != 0
        torch.testing.assert_close(added[left], (whole / 0.75).expand_as(added)[left], rtol=1e-3, atol=1e-4)
        silent.weight.copy_(weight)


def test_dropout_leaves_the_condition_and_what_is_read_alone() -> None:
    plain, model = perturbed(causal=True), perturbed(causal=True, dropout=0.5)
    xt, e = inputs()
    every = torch.tensor([True] * B)
    wanted, condition = plain.hidden(xt, e, causal=every), plain.condition(e)
    # Nothing of the condition is left out even in training; decoding reads with the model as it is at rest.
    assert all(map(torch.equal, model.train().condition(e), condition))
    assert torch.equal(model.bag(e), plain.bag(e))
    model.eval()
    cache = model.cache(condition)
    for where in torch.arange(T).expand(B, T).split([3, T - 3], dim=1):
        found = model.read(xt, where, condition=condition, cache=cache)
        torch.testing.assert_close(found, wanted[:, where[0]])


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_places_of_a_blank_row_differ(positions: str) -> None:
    model = perturbed(positions=positions)
    _, e = inputs()
    logits = model(torch.full((B, T), MASK), e)
    assert gap(logits[:, 0], logits[:, 1]) > 1e-2
    model.places.zero_()  # rotary positions alone cannot do it: all values are the same
    logits = model(torch.full((B, T), MASK), e)
    assert gap(logits[:, 0], logits[:, 1]) < 1e-4


def test_rotary_and_learned_share_their_parameters() -> None:
    rotary, learned = perturbed(positions="rotary"), perturbed(positions="learned")
    assert rotary.state_dict().keys() == learned.state_dict().keys()
    xt, e = inputs()
    assert gap(rotary(xt, e), learned(xt, e)) > 1e-3


@pytest.mark.parametrize("rank", [1, 4])
def test_a_diagonal_is_what_it_adds_to_a_map_of_low_rank(rank: int) -> None:
    torch.manual_seed(0)
    modulation = Modulation(dataclasses.replace(CONFIG, adaln_rank=rank, adaln_diagonal=True), 6)
    for p in modulation.parameters():
        p.normal_()
    full = nn.Linear(32, 6 * 32)
    assert modulation.diagonal is not None and isinstance(modulation.down, nn.Linear)
    diagonals = [torch.diag(part) for part in modulation.diagonal.chunk(6)]
    full.weight.copy_(modulation.up.weight @ modulation.down.weight + torch.cat(diagonals))
    full.bias.copy_(modulation.up.bias)
    c = torch.randn(B, 32)
    torch.testing.assert_close(modulation.of(c), full(c))


@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("time_conditioning", [True, False])
def test_parameters_of_a_modulation(rank: int, time_conditioning: bool, diagonal: bool) -> None:
    config = dataclasses.replace(
        CONFIG, adaln_rank=rank, time_conditioning=time_conditioning, adaln_diagonal=diagonal
    )
    width, out = 32, 6 * 32
    expected = (width * rank + rank * out if rank else width * out) + out  # and the bias
    expected += 2 * out if time_conditioning else 0
    expected += out if diagonal else 0
    assert parameter_counts(Modulation(config, 6))[0] == expected


def test_parameter_counts() -> None:
    model = Denoiser(CONFIG)
    block = (32 * 192 + 192) + 4 * 32 * 32 + 2 * 8 + 2 * 32 * 48
    projection = E * 32 + 32 + 32 * 32 + 32 + 32
    total = projection + V * 32 + T * 32 + 2 * block + (32 * 64 + 64) + V
    assert parameter_counts(model) == (total, total)
    model.tokens.requires_grad_(False)
    assert parameter_counts(model) == (total, total - V * 32)
    shared = nn.ModuleList([model.tokens, model.tokens])
    assert parameter_counts(shared) == (V * 32, 0)


def test_tied_head_is_one_tensor() -> None:
    model = perturbed()
    assert [n for n, p in model.named_parameters() if p.shape == (V, 32)] == ["tokens.weight"]
    assert [n for n, p in model.state_dict().items() if p.shape == (V, 32)] == ["tokens.weight"]
    xt, e = torch.full((1, T), 7), inputs()[1][:1]
    before = model(xt, e)
    model.tokens.weight[7] = torch.randn(32, generator=torch.Generator().manual_seed(5))
    after = model(xt, e)
    assert (before - after)[..., 7].abs().max() > 1e-2  # as an output
    assert (before - after)[..., 8].abs().max() > 1e-3  # and as the input of all others


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_rows_do_not_see_each_other(positions: str) -> None:
    model = perturbed(positions=positions, time_conditioning=True)
    xt, e = inputs(rows=5)
    t, drop = torch.linspace(0.1, 0.9, 5), torch.tensor([False, True, False, False, True])
    together = model(xt, e, t=t, drop=drop)
    for i in range(5):
        alone = model(xt[i : i + 1], e[i : i + 1], t=t[i : i + 1], drop=drop[i : i + 1])
        assert gap(together[i : i + 1], alone) < 1e-5


def test_every_place_sees_every_other() -> None:
    model = perturbed()
    xt, e = inputs(rows=1)
    for place in (0, T - 1):
        changed = xt.clone()
        changed[0, place] = (changed[0, place] + 5) % V
        moved = (model.hidden(xt, e) - model.hidden(changed, e)).abs().amax(-1)
        assert (moved > 1e-4).all()


def test_same_seed_same_weights() -> None:
    torch.manual_seed(3)
    one = Denoiser(CONFIG).state_dict()
    torch.manual_seed(3)
    two = Denoiser(CONFIG).state_dict()
    assert all(torch.equal(one[k], two[k]) for k in one)
