"""The optimisers: which parameter goes where, what Muon does to it, and the rate over a run."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unembed.backbone import build
from unembed.config import Decay, ModelConfig, TrainConfig
from unembed.model import Denoiser
from unembed.optimizers import Muon, build_optimizers, orthogonalise, rate_at

CONFIG = ModelConfig(
    layers=2, hidden=16, heads=2, ffn=48, max_tokens=8, vocab_size=40, mask_id=3, end_id=1, pad_id=0,
    embedding_size=6, adaln_rank=4, time_conditioning=True,
)  # fmt: skip
MUON = TrainConfig(optimizer="muon", learning_rate=1e-3, muon_rate=3e-3, weight_decay=0.1)


def matrix(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stepped(
    parts: list[Tensor], gradients: list[Tensor], *, steps: int = 3, fused: bool = False, **options: Any
) -> Tensor:
    """Return the parameters, stacked, after some steps of Muon on gradients that change."""
    params = [nn.Parameter(part.clone()) for part in parts]
    values = {"lr": 0.1, "weight_decay": 0.01, **options}
    optimizer = Muon(params, fused=params if fused else [], **values)
    for step in range(steps):
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient * (1 + step) + step
        optimizer.step()
    return torch.cat([p.detach() for p in params])


# Muon


@pytest.mark.parametrize("shape", [(16, 16), (16, 48), (48, 16), (5, 64), (2, 8)])
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    stack = torch.stack([matrix(*shape, seed=seed) * 10.0**seed for seed in range(-3, 3)])
    found = orthogonalise(stack)
    assert found.shape == stack.shape
    values = torch.linalg.svdvals(found)
    # Newton-Schulz with these coefficients ends in a band around 1; what was small comes up last.
    assert float(values.max()) < 1.3
    assert float(values.median()) > 0.68 and float(values.mean()) == pytest.approx(1, abs=0.2)


def test_directions_are_kept() -> None:
    u, _, v = torch.linalg.svd(matrix(12, 12))
    found = orthogonalise((u @ torch.diag(torch.linspace(0.5, 2, 12)) @ v)[None])[0]
    turned = u.T @ found @ v.T
    assert float((turned - torch.diag(turned.diag())).abs().max()) < 1e-4
    assert float(turned.diag().min()) > 0.6


def test_a_stack_is_orthogonalised_one_by_one() -> None:
    stack = torch.stack([matrix(6, 9, seed=s) * (s + 1) for s in range(4)])
    alone = torch.cat([orthogonalise(one[None]) for one in stack])
    torch.testing.assert_close(orthogonalise(stack), alone)
    assert not orthogonalise(torch.zeros(1, 3, 3)).any()


def test_a_fused_matrix_is_three() -> None:
    parts, gradients = ([matrix(8, 8, seed=s + i) * (i + 1) for i in range(3)] for s in (0, 10))
    apart = stepped(parts, gradients)
    fused = stepped([torch.cat(parts)], [torch.cat(gradients)], fused=True)
    torch.testing.assert_close(fused, apart)
    assert not torch.allclose(stepped([torch.cat(parts)], [torch.cat(gradients)]), apart, atol=1e-2)


def test_an_update_is_of_adamws_size() -> None:
    for shape in ((64, 64), (64, 256), (256, 64)):
        update = stepped([torch.zeros(shape)], [matrix(*shape)], steps=1, lr=1.0, weight_decay=0.0)
        assert float(update.pow(2).mean().sqrt()) == pytest.approx(0.2, rel=0.2)
        assert float((update * matrix(*shape)).sum()) < 0  # downhill


def test_momentum_is_nesterovs() -> None:
    p, gradients = nn.Parameter(torch.zeros(4, 4)), [matrix(4, 4, seed=s) for s in range(3)]
    optimizer = Muon([p], lr=1.0, momentum=0.9, weight_decay=0.0)
    buffer, expected = torch.zeros(4, 4), torch.zeros(4, 4)
    for gradient in gradients:
        p.grad = gradient.clone()
        optimizer.step()
        buffer = 0.9 * buffer + 0.1 * gradient
        expected = expected - 0.4 * orthogonalise((0.1 * gradient + 0.9 * buffer)[None])[0]
        assert torch.equal(p.grad, gradient)
    torch.testing.assert_close(p.detach(), expected)


def test_decay_is_decoupled_and_a_parameter_without_gradient_rests() -> None:
    moved, rests = nn.Parameter(matrix(4, 4)), nn.Parameter(matrix(4, 4))
    moved.grad = torch.zeros(4, 4)
    Muon([moved, rests], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(moved.detach(), matrix(4, 4) * 0.95)
    assert torch.equal(rests.detach(), matrix(4, 4))


# Who takes what


def names_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[set[str]]:
    """Return the names of the parameters of each group."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [{names[id(p)] for p in group["params"]} for group in optimizer.param_groups]


def test_adamw_takes_everything_and_decays_matrices() -> None:
    model = Denoiser(CONFIG)
    (adamw,) = build_optimizers(model, dataclasses.replace(MUON, optimizer="adamw"))
    decayed, plain = names_of(model, adamw)
    shapes = {name: p.dim() for name, p in model.named_parameters()}
    assert decayed == {name for name, dim in shapes.items() if dim >= 2}
    assert plain == {name for name, dim in shapes.items() if dim < 2}
    assert {"projection.null", "bias", "blocks.0.attention.q_scale"} <= plain
    assert [g["weight_decay"] for g in adamw.param_groups] == [0.1, 0.0]
    assert [g["lr"] for g in adamw.param_groups] == [g["peak"] for g in adamw.param_groups] == [1e-3] * 2


def test_muon_takes_the_matrices_of_the_blocks() -> None:
    model = Denoiser(CONFIG)
    adamw, muon = build_optimizers(model, MUON)
    (block,) = names_of(model, muon)
    assert block == {
        f"blocks.{i}.{name}.weight"
        for i in range(2)
        for name in ("attention.qkv", "attention.out", "up", "down")
    }
    decayed, plain = names_of(model, adamw)
    assert {"tokens.weight", "places", "blocks.0.modulation.up.weight"} <= decayed
    groups = [block, decayed, plain]
    assert sum(map(len, groups)) == len(set.union(*groups)) == len(list(model.parameters()))
    assert isinstance(muon, Muon)
    (group,) = muon.param_groups
    assert (group["lr"], group["peak"], group["weight_decay"]) == (3e-3, 3e-3, 0.1)


def test_only_attention_is_fused_though_the_feed_forward_is_as_tall() -> None:
    model = Denoiser(CONFIG)  # ffn is 3 x hidden, as twice mmBERT's 1152 is three times its 768
    p = model.get_parameter("blocks.0.up.weight")
    assert p.shape[0] == 3 * p.shape[1]
    before, optimizers = p.detach().clone(), build_optimizers(model, MUON)
    for q in model.parameters():
        q.grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(0))
    for optimizer in optimizers:
        optimizer.step()
    assert p.grad is not None
    expected = stepped([before], [p.grad], steps=1, lr=3e-3, weight_decay=0.1)
    torch.testing.assert_close(p.detach(), expected)


def test_a_pretrained_model_is_split_likewise_and_frozen_weights_stay_out() -> None:
    values: dict[str, Any] = {"backbone": "a/backbone", "ffn": 24, "adaln_rank": 0}
    model = build(dataclasses.replace(CONFIG, **values), pretrained=False)
    adamw, muon = build_optimizers(model, MUON)
    (block,) = names_of(model, muon)
    assert block == {
        f"blocks.{i}.{n}.weight" for i in range(2) for n in ("attn.Wqkv", "attn.Wo", "mlp.Wi", "mlp.Wo")
    }
    qkv = [p for name, p in model.named_parameters() if "Wqkv" in name]
    assert isinstance(muon, Muon) and muon._fused == {id(p) for p in qkv}
    frozen = build(dataclasses.replace(CONFIG, **values, freeze="backbone"), pretrained=False)
    (adamw,) = build_optimizers(frozen, MUON)
    taken = set.union(*names_of(frozen, adamw))
    assert taken == {name for name, p in frozen.named_parameters() if p.requires_grad}
    assert not any("attn" in name for name in taken)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_moves_every_parameter_and_lowers_the_loss(optimizer: Any) -> None:
    torch.manual_seed(0)
    model = Denoiser(CONFIG)
    xt, e = torch.full((4, 8), 3), matrix(4, 6)
    target = torch.randint(4, 40, (4, 8), generator=torch.Generator().manual_seed(0))
    found = build_optimizers(model, dataclasses.replace(MUON, optimizer=optimizer, learning_rate=1e-2))
    before, losses = {n: p.detach().clone() for n, p in model.named_parameters()}, []
    drop = torch.tensor([True, False, False, False])
    for _ in range(15):
        logits = model(xt, e, t=torch.ones(4), drop=drop)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        loss.backward()
        losses.append(loss.item())
        for one in found:
            one.step()
            one.zero_grad()
    assert losses[-1] < 0.8 * losses[0]
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


# The rate


def test_the_rate_warms_up_in_a_straight_line() -> None:
    config = TrainConfig(warmup=4)
    assert [rate_at(step, 0.0, config) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rate_at(0, 0.0, TrainConfig(warmup=0)) == 1.0


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("constant", [1, 1, 1, 1, 1]),
        ("linear", [1, 1, 1, 0.5, 0]),
        ("cosine", [1, 1, 1, 0.5, 0]),
    ],
)
def test_the_rate_falls_after_its_share_of_the_run(decay: Decay, expected: list[float]) -> None:
    config = TrainConfig(warmup=0, decay=decay, decay_start=0.5)
    assert [rate_at(9, p, config) for p in (0, 0.25, 0.5, 0.75, 1)] == pytest.approx(expected, abs=1e-12)


def test_cosine_is_flat_at_both_ends() -> None:
    config = TrainConfig(warmup=0, decay="cosine", decay_start=0.0)
    for progress in (0.1, 0.3, 0.9):
        assert rate_at(0, progress, config) == pytest.approx((1 + math.cos(math.pi * progress)) / 2)


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("start", [0.0, 0.5, 1.0])
def test_the_rate_never_leaves_its_bounds(decay: Decay, start: float) -> None:
    config = TrainConfig(warmup=10, decay=decay, decay_start=start)
    rates = [rate_at(step, step / 100, config) for step in range(130)]  # past the end, too
    assert all(0 <= rate <= 1 for rate in rates)
    assert all(b <= a + 1e-12 for a, b in zip(rates[9:], rates[10:], strict=False))


def test_warm_up_and_decay_multiply() -> None:
    config = TrainConfig(warmup=100, decay="linear", decay_start=0.0)
    assert rate_at(49, 0.5, config) == pytest.approx(0.25)
