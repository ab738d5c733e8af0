"""Models as decoding runs them: the same answers, in other numbers or by a recording."""

from __future__ import annotations

import copy
import os
import platform
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from unembed import engine
from unembed.backbone import build
from unembed.checkpoint import dequantise, quantise
from unembed.config import DiffusionConfig, ModelConfig
from unembed.decode import DecodeOptions, Draft, decode, draw_uniforms
from unembed.engine import HalfModel, Int8Linear, Int8Model, RecordedModel, prepare
from unembed.model import Denoiser

T, V, E, MASK = 8, 70, 12, 4
CONFIG = ModelConfig(
    layers=2, hidden=32, heads=2, ffn=64, max_tokens=T, vocab_size=V, mask_id=MASK, end_id=1, pad_id=0,
    embedding_size=E, adaln_rank=4, adaln_diagonal=True, time_conditioning=True,
)  # fmt: skip


def denoiser(**changes: Any) -> Denoiser:
    torch.manual_seed(0)
    model = Denoiser(ModelConfig(**(vars(CONFIG) | changes))).eval().requires_grad_(False)
    for p in model.parameters():
        p.add_(torch.randn_like(p) * 0.1)
    return model


def inputs(rows: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(1)
    return {
        "xt": torch.randint(0, V, (rows, T), generator=draw),
        "e": torch.randn(rows, E, generator=draw),
        "t": torch.rand(rows, generator=draw),
        "drop": torch.rand(rows, generator=draw) < 0.3,
    }


def run(model: Any, e: Tensor, *, first: int = 0, **options: Any) -> Draft:
    chosen = DecodeOptions(steps=4, **options).fit(model.config)
    uniforms = draw_uniforms(first, first + len(e), steps=chosen.steps, length=T, seed=0)
    *_, last = decode(model, e, options=chosen, diffusion=DiffusionConfig(), uniforms=uniforms)
    return last


# Whole numbers


def test_a_linear_map_in_whole_numbers_is_exact_in_them() -> None:
    draw = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(40, 24, generator=draw), torch.randn(40, generator=draw)
    x = torch.randn(3, 5, 24, generator=draw) * torch.logspace(-3, 3, 5)[:, None]
    linear = Int8Linear(weight, bias)
    scale = weight.abs().amax(1) / 127
    step = x.abs().amax(-1, keepdim=True) / 127
    whole = (x / step).round().double() @ (weight / scale[:, None]).round().double().T
    torch.testing.assert_close(linear(x), (whole * scale * step + bias).float())
    error = (linear(x) - x @ weight.T - bias).abs() / (x.norm(dim=-1, keepdim=True) * weight.norm(dim=1))
    assert float(error.max()) < 0.02


def test_extreme_rows_are_neither_lost_nor_blown_up() -> None:
    linear = Int8Linear(torch.tensor([[127.0] * 256, [-127.0] * 256]))
    x = torch.stack([torch.zeros(256), torch.full((256,), 1e-30), torch.full((256,), -1e30)])
    torch.testing.assert_close(linear(x), x @ torch.tensor([[127.0] * 256, [-127.0] * 256]).T)
    assert linear(x[:0]).shape == (0, 2)


def test_weights_that_came_as_bytes_are_the_same_bytes() -> None:
    weight = torch.randn(30, 20, generator=torch.Generator().manual_seed(0))
    stored = quantise({"w": weight})
    linear = Int8Linear(dequantise(stored)["w"])
    assert torch.equal(linear.weight, stored["w"])
    torch.testing.assert_close(linear.scale, stored["w.scale"].squeeze(1))


@pytest.mark.parametrize("biased", [True, False])
def test_sums_scaled_in_parts_are_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch, biased: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(40, 24, generator=draw), torch.randn(40, generator=draw)
    x = torch.randn(3, 7, 24, generator=draw) * torch.logspace(-3, 3, 7)[:, None]
    linear = Int8Linear(weight, bias if biased else None)
    given = x.clone()
    # In one piece and out of place, by the formula, in its order.
    step = x.abs().amax(-1, keepdim=True) / 127
    whole = ((x / step).round().long() @ linear.weight.long().T).float()
    wanted = whole * linear.scale * step + (bias if biased else 0)
    for sums in (1, 40, 120, 300, 10**6):  # a row at a time, parts that do and do not divide 21, one piece
        monkeypatch.setattr(engine, "_SUMS", sums)
        assert torch.equal(linear(x), wanted)
    assert torch.equal(x, given)  # what is written over is the map's own


@pytest.mark.parametrize("causal", [True, False])
def test_a_trunk_run_in_parts_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    model, given = Int8Model(denoiser(causal=True)), inputs(7)
    given |= {"causal": torch.arange(7) % 2 == 0} if causal else {}
    assert model.condition is not None
    known = {"condition": model.condition(given["e"], drop=given["drop"])}
    sizes: list[int] = []
    trunk = model.model.hidden

    def counted(xt: Tensor, e: Tensor, **known: Any) -> Tensor:
        sizes.append(len(xt))
        return trunk(xt, e, **known)

    monkeypatch.setattr(model.model, "hidden", counted)
    wanted = model.hidden(**given)
    for places, parts in ((1, [1] * 7), (3 * T, [3, 3, 1]), (4 * T, [4, 3]), (7 * T, [7])):
        monkeypatch.setattr(engine, "_PLACES", places)
        for more in ({}, known, {"drop": None} | known):
            sizes.clear()
            assert torch.equal(model.hidden(**given | more), wanted)
            assert sizes == parts


@pytest.mark.parametrize("strategy", ["confidence", "euler-remask", "causal"])
def test_in_whole_numbers_batch_size_changes_nothing(strategy: str) -> None:
    model, e = Int8Model(denoiser(causal=True)), inputs(7)["e"]
    whole = run(model, e, strategy=strategy)
    for n in range(7):
        alone = run(model, e[n : n + 1], first=n, strategy=strategy)
        assert torch.equal(alone.ids[0], whole.ids[n])
        assert torch.equal(alone.confidence[0], whole.confidence[n])


# Both copies


@pytest.mark.parametrize(("kind", "near"), [(HalfModel, 0.06), (Int8Model, 0.06)])
@pytest.mark.parametrize("changes", [{}, {"positions": "learned", "adaln_rank": 0}])
def test_a_copy_says_about_the_same(kind: Any, near: float, changes: dict[str, Any]) -> None:
    model = denoiser(**changes)
    before = copy.deepcopy(model.state_dict())
    made, given = kind(model), inputs(6)
    wanted = model.head(model.hidden(**given))
    found = made.head(made.hidden(**given)).float()
    others = torch.arange(V) != MASK
    spread = float(wanted[..., others].std())
    assert float((found[..., :V] - wanted)[..., others].abs().max()) < near * 5 * spread
    assert float((found[..., :V] - wanted)[..., others].abs().mean()) < near * spread / 2
    assert (found[..., MASK] == -torch.inf).all() and (found[..., V:] == -torch.inf).all()
    # The model itself is what training and saving go on with.
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", [HalfModel, Int8Model])
def test_a_copy_reads_a_place_at_a_time(kind: Any) -> None:
    made, given = kind(denoiser(causal=True, layers=3)), inputs(6)
    rows, t = torch.ones(6, dtype=torch.bool), given["t"]
    with torch.inference_mode():
        wanted = made.hidden(given["xt"], given["e"], t=t, causal=rows)
        condition = made.condition(given["e"])
        cache = made.cache(condition)
        places = torch.arange(T).expand(6, T).split(1, dim=1)
        found = [made.read(given["xt"], where, t=t, condition=condition, cache=cache) for where in places]
    gap = (torch.cat(found, 1) - wanted).float().abs()
    # Rounding to whole numbers, or to few digits, makes a last bit larger, here and there.
    assert float(gap.max()) < 0.1 and float(gap.mean()) < 0.01
    assert all(part.dtype == condition[-1].dtype for part in cache)


def some_texts(rows: int) -> Tensor:
    """Ids of texts of all lengths, with padding behind them."""
    ids = torch.randint(5, V, (rows, T), generator=torch.Generator().manual_seed(3))
    return ids.masked_fill(torch.arange(T) > torch.arange(rows)[:, None] % T, 0)


@pytest.mark.parametrize("kind", [HalfModel, Int8Model, lambda model: RecordedModel(HalfModel(model))])
@pytest.mark.parametrize("changes", [{}, {"positions": "learned", "adaln_rank": 0}])
def test_a_copy_guesses_about_the_same_vectors(kind: Any, changes: dict[str, Any]) -> None:
    model, ids = denoiser(embeds=True, **changes), some_texts(40)
    assert not kind(model).embeds
    model.embeds = True
    made = kind(model)
    assert made.embeds
    wanted, found = model.embed(ids), made.embed(ids)
    assert found.dtype == torch.float32
    assert float(torch.cosine_similarity(found, wanted).min()) > 0.99
    torch.testing.assert_close(found.norm(dim=1), torch.ones(40))
    between = torch.cosine_similarity(wanted[::2], wanted[1::2])  # else all would be near all
    assert float(between.abs().mean()) < 0.9


def test_in_whole_numbers_guesses_do_not_depend_on_the_texts_beside_them() -> None:
    model, ids = Int8Model(denoiser(embeds=True)), some_texts(7)
    whole = model.embed(ids)
    for n in range(7):
        assert torch.equal(model.embed(ids[n : n + 1])[0], whole[n])


@pytest.mark.parametrize("kind", [HalfModel, Int8Model])
def test_no_token_is_made_up(kind: Any) -> None:
    model = denoiser()
    model.bias[MASK] = 100.0
    e = inputs(40)["e"]
    chosen: tuple[dict[str, Any], ...] = ({"temperature": 50.0}, {"temperature": 50.0, "guidance": 2.0}, {})
    for options in chosen:
        ids = run(kind(model), e, **options).ids
        assert int(ids.max()) < V and not (ids == MASK).any()
    assert int(ids.min()) >= 0


@pytest.mark.parametrize("kind", [HalfModel, Int8Model])
def test_a_pretrained_backbone_can_be_copied(kind: Any) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = build(ModelConfig(**(vars(CONFIG) | {"backbone": "any"})), pretrained=False).eval()
    made, given = kind(model), inputs(3)
    assert not made.embeds and made.embed is None
    with torch.inference_mode():
        wanted, found = model.head(model.hidden(**given)), made.head(made.hidden(**given))
    others = torch.arange(V) != MASK
    gap = (found[..., :V].float() - wanted)[..., others]
    assert float(gap.abs().max()) < 0.1 * float(wanted[..., others].abs().max())


def test_what_is_prepared_is_what_was_asked_for() -> None:
    model = denoiser()
    assert prepare(model, "fp32") is model
    assert isinstance(prepare(model, "bf16"), HalfModel)  # on a GPU recorded too
    assert isinstance(prepare(model, "int8"), Int8Model)
    assert isinstance(engine.fast_int8(), bool)


# Recordings


class Tape:
    """Stands for a CUDA graph: runs the trunk on tensors of its own, and counts."""

    made: list[Tape] = []

    def __init__(self, run: Any, given: list[Tensor], pool: Any) -> None:
        self.run, self.inputs, self.replays = run, [x.clone() for x in given], 0
        Tape.made.append(self)

    def replay(self, given: list[Tensor]) -> Tensor:
        torch._foreach_copy_(self.inputs, given)
        self.replays += 1
        return self.run(self.inputs)


def test_a_shape_is_recorded_when_it_keeps_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tape, "made", [])
    monkeypatch.setattr(engine._Recording, "of", Tape)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(engine, "_RECORDINGS", 2)
    model = denoiser()
    recorded = RecordedModel(model, record_after=2)
    for rows, tapes, replays in ((3, 0, 0), (3, 0, 0), (3, 1, 1), (3, 1, 2), (4, 1, 2), (4, 1, 2), (4, 2, 3)):
        given = {name: x.roll(rows) for name, x in inputs(rows).items()}
        assert torch.equal(recorded.hidden(**given), model.hidden(**given))
        assert len(Tape.made) == tapes and sum(tape.replays for tape in Tape.made) == replays
    given = inputs(3)
    for drop in (given["drop"], ~given["drop"]):  # other values, the same recording
        assert torch.equal(recorded.hidden(**given | {"drop": drop}), model.hidden(**given | {"drop": drop}))
    assert len(Tape.made) == 2
    # No t is another trunk, and room has run out: run as it is.
    for _ in range(4):
        assert torch.equal(recorded.hidden(given["xt"], given["e"]), model.hidden(given["xt"], given["e"]))
    assert len(Tape.made) == 2


def test_decoding_by_recordings_is_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tape, "made", [])
    monkeypatch.setattr(engine._Recording, "of", Tape)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    model, e = denoiser(causal=True), inputs(5)["e"]
    for options in ({}, {"guidance": 3.0}, {"strategy": "euler"}, {"strategy": "causal"}):
        found, wanted = run(RecordedModel(model, record_after=0), e, **options), run(model, e, **options)
        assert torch.equal(found.ids, wanted.ids)
        torch.testing.assert_close(found.confidence, wanted.confidence, atol=1e-5, rtol=0)
    assert Tape.made


REUSE = """
import resource
import torch
from unembed.engine import keep_freed_memory

kept = keep_freed_memory()
for _ in range(16):
    torch.ones(2**22)  # 16 MB, 4096 pages: the first few have to be fetched
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(16):
    torch.ones(2**22)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
def test_freed_memory_is_used_again_unless_the_user_knows_better() -> None:
    def faults(**more: str) -> tuple[str, int]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        done = subprocess.run(
            [sys.executable, "-c", REUSE], env=clean | more, check=True, capture_output=True, text=True
        )
        kept, count = done.stdout.split()
        return kept, int(count)

    kept, count = faults()
    assert kept == "True" and count < 4 * 4096
    kept, count = faults(MALLOC_MMAP_THRESHOLD_="131072")
    assert kept == "False" and count > 12 * 4096
