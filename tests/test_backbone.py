"""The wrapper is the masked LM until trained, freezes what it says, and has the paper's counts."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, ModernBertConfig, ModernBertForMaskedLM, ModernBertModel

from unembed import backbone
from unembed.backbone import PretrainedDenoiser, build, count, freeze
from unembed.cli import main
from unembed.config import Freeze, ModelConfig, preset
from unembed.errors import UnembedError
from unembed.model import Denoiser, Modulation

VOCAB, LENGTH = 60, 24


def lm_config(**changes: Any) -> ModernBertConfig:
    # Layers 0 and 3 are global, 1 and 2 see four places to either side of their own; the two kinds
    # turn at different speeds; weights are wide, so that a wrong place or window shows.
    values: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "vocab_size": VOCAB,
        "local_attention": 8,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 160_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "cls_token_id": 1,
        "sep_token_id": 1,
        "mask_token_id": 4,
    }
    return ModernBertConfig(**{**values, **changes})


@pytest.fixture(scope="module")
def lm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    lm = ModernBertForMaskedLM(lm_config())
    torch.nn.init.normal_(lm.decoder.bias)
    for name, p in lm.named_parameters():
        if "norm" in name:  # so that a norm whose weight is lost shows
            torch.nn.init.uniform_(p, 0.5, 1.5)
    folder = tmp_path_factory.mktemp("lm")
    lm.save_pretrained(folder)
    return folder


@pytest.fixture
def config(lm_folder: Path) -> ModelConfig:
    return ModelConfig(
        layers=4,
        hidden=64,
        heads=4,
        ffn=96,
        max_tokens=LENGTH,
        vocab_size=VOCAB,
        mask_id=4,
        end_id=1,
        pad_id=0,
        embedding_size=16,
        adaln_rank=0,
        time_conditioning=True,
        backbone=str(lm_folder),
    )


def wrapper(config: ModelConfig) -> PretrainedDenoiser:
    model = build(config)
    assert isinstance(model, PretrainedDenoiser)
    return model


def inputs(rows: int = 3, length: int = LENGTH) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(1)
    return {
        "xt": torch.randint(0, VOCAB, (rows, length), generator=draw),
        "e": torch.randn(rows, 16, generator=draw),
        "t": torch.rand(rows, generator=draw),
    }


def train_a_little(model: torch.nn.Module, steps: int = 3) -> None:
    x0 = torch.randint(5, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        given = inputs()
        logits = model(**given)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), x0.flatten()).backward()
        optimizer.step()


@pytest.mark.parametrize("length", [1, 5, LENGTH])
def test_untrained_wrapper_gives_the_lms_own_logits(
    config: ModelConfig, lm_folder: Path, length: int
) -> None:
    lm = ModernBertForMaskedLM.from_pretrained(lm_folder).eval()
    model = wrapper(config).eval()
    given = inputs(length=length)
    with torch.no_grad():
        own = lm(input_ids=given["xt"]).logits
        got = model(**given)
    assert own.std() > 0.3  # a comparison of near-constants would show nothing
    others = torch.arange(VOCAB) != config.mask_id
    torch.testing.assert_close(got[..., others], own[..., others], atol=1e-5, rtol=0)
    assert (got[..., config.mask_id] == -torch.inf).all()


@pytest.mark.parametrize(
    "change",
    [{"local_attention": 12}, {"layer_types": ["full_attention"] * 4}],
    ids=["window", "pattern"],
)
def test_the_comparison_sees_window_and_pattern(
    config: ModelConfig, lm_folder: Path, change: dict[str, Any]
) -> None:
    """The LM with another window or pattern differs by far more than the tolerance."""
    other = ModernBertForMaskedLM.from_pretrained(lm_folder, config=lm_config(**change)).eval()
    given = inputs()
    with torch.no_grad():
        gap = (other(input_ids=given["xt"]).logits - wrapper(config)(**given))[..., 5:].abs().max()
    assert gap > 1e-2


def test_rotary_positions_tell_places_apart(config: ModelConfig) -> None:
    """The same tokens in another order give other predictions, though `places` is still zero."""
    model = wrapper(config)
    given = inputs(rows=1)
    with torch.no_grad():
        straight = model.hidden(**given)
        turned = model.hidden(given["xt"].flip(1), given["e"], t=given["t"]).flip(1)
        rolled = model.hidden(given["xt"].roll(1, 1), given["e"], t=given["t"]).roll(-1, 1)
    assert (straight - turned).abs().max() > 1e-2
    assert (straight - rolled).abs().max() > 1e-2


def test_all_masked_row_needs_places(config: ModelConfig) -> None:
    model = wrapper(config)
    given = inputs(rows=1)
    blank = torch.full((1, LENGTH), config.mask_id)
    with torch.no_grad():
        h = model.hidden(blank, given["e"])
    torch.testing.assert_close(h, h[:, :1].expand_as(h), atol=1e-4, rtol=0)
    assert (model.places == 0).all()
    torch.nn.init.normal_(model.places)
    with torch.no_grad():
        h = model.hidden(blank, given["e"])
    assert (h[:, 0] - h[:, 1]).abs().max() > 0.1


def test_fewer_layers_are_the_first_ones(config: ModelConfig, lm_folder: Path) -> None:
    lm = ModernBertForMaskedLM.from_pretrained(lm_folder).eval()
    model = wrapper(dataclasses.replace(config, layers=2))
    lm.model.layers = lm.model.layers[:2]
    given = inputs()
    with torch.no_grad():
        own, got = lm(input_ids=given["xt"]).logits, model(**given)
    torch.testing.assert_close(got[..., 5:], own[..., 5:], atol=1e-5, rtol=0)


def test_where_is_a_gather(config: ModelConfig) -> None:
    model = wrapper(config)
    given = inputs()
    where = torch.rand(3, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.4
    with torch.no_grad():
        torch.testing.assert_close(model(**given, where=where), model(**given)[where])


def test_condition_is_learned_and_can_be_dropped(config: ModelConfig) -> None:
    model = wrapper(config)
    given = inputs()
    other = {**given, "e": given["e"].flip(0) + 1}
    with torch.no_grad():
        torch.testing.assert_close(model(**given), model(**other))  # nothing learned yet
    train_a_little(model)
    with torch.no_grad():
        base = model(**given)
        assert (base - model(**other))[..., 5:].abs().max() > 1e-3
        assert (base - model(given["xt"], given["e"], t=1 - given["t"]))[..., 5:].abs().max() > 1e-5
        drop = torch.tensor([True, False, True])
        one, two = model(**given, drop=drop), model(**other, drop=drop)
    torch.testing.assert_close(one[drop], two[drop])
    assert (one[drop] - base[drop])[..., 5:].abs().max() > 1e-3
    torch.testing.assert_close(one[~drop], base[~drop])


def test_every_scale_shift_and_gate_acts(config: ModelConfig) -> None:
    model = wrapper(dataclasses.replace(config, layers=2))
    with torch.no_grad():
        plain = model.hidden(**inputs())
        modulations = [m for m in model.modules() if isinstance(m, Modulation)]
        assert sorted(m.chunks for m in modulations) == [3, 6, 6]
        for modulation in modulations:
            for chunk in modulation.up.bias.view(modulation.chunks, -1):
                chunk[::2] = 0.5
                assert (model.hidden(**inputs()) - plain).abs().max() > 1e-2
                chunk.zero_()
        torch.testing.assert_close(model.hidden(**inputs()), plain)


def test_tied_weights_are_one_tensor_and_survive_a_round_trip(config: ModelConfig) -> None:
    model = wrapper(config)
    train_a_little(model)
    state = model.state_dict()
    assert [k for k, v in state.items() if v.shape == (VOCAB, 64)] == ["tokens.weight"]
    pointers = [v.data_ptr() for v in state.values()]
    assert len(set(pointers)) == len(pointers)  # nothing is shared, so safetensors can hold it
    # Neither the folder nor a hub is needed, and windows and speeds come with the state.
    bare = dataclasses.replace(config, backbone="nobody/nothing")
    with torch.device("meta"):
        again = build(bare, pretrained=False)
    again.load_state_dict(state, assign=True)
    eager = build(bare, pretrained=False)
    eager.load_state_dict(state)
    with torch.no_grad():
        expected = model(**inputs())
        torch.testing.assert_close(again(**inputs()), expected)
        torch.testing.assert_close(eager(**inputs()), expected)
        seen = 7
        here = {**inputs(), "xt": torch.full((1, LENGTH), seen), "e": inputs()["e"][:1], "t": None}
        expected = again(**here)
        again.tokens.weight[seen] = torch.randn(64, generator=torch.Generator().manual_seed(5))
        change = (again(**here) - expected).abs()
    assert change[..., seen].max() > 0.1  # as an output
    assert change[..., seen + 1].max() > 0.1  # and as the input of all others


def test_padding_learns_as_any_token(config: ModelConfig) -> None:
    model = wrapper(config)
    model.tokens(torch.zeros(1, 1, dtype=torch.long)).sum().backward()
    assert model.tokens.weight.grad is not None
    assert (model.tokens.weight.grad[0] == 1).all()


def test_bfloat16_keeps_the_geometry(config: ModelConfig) -> None:
    model = wrapper(config).to(torch.bfloat16)
    assert model.thetas.tolist() == [160_000, 10_000, 10_000, 160_000]
    assert model.windows[1:3].tolist() == [4, 4]
    given = inputs()
    with torch.no_grad():
        logits = model(given["xt"], given["e"].bfloat16(), t=given["t"])
    assert logits.dtype == torch.bfloat16
    assert logits[..., 5:].isfinite().all()


VOCABULARY = {"tokens.weight", "prediction.dense.weight", "prediction.norm.weight", "bias"}


@pytest.mark.parametrize("mode", ["none", "embeddings", "backbone"])
def test_freeze_modes(config: ModelConfig, lm_folder: Path, mode: Freeze) -> None:
    model = wrapper(dataclasses.replace(config, freeze=mode))
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    total = sum(p.numel() for p in model.parameters())
    pretrained = sum(p.numel() for p in ModernBertForMaskedLM.from_pretrained(lm_folder).parameters())
    ours = 16 * 64 + 64 + 64 * 64 + 64 + 64  # the projection and its null condition
    ours += LENGTH * 64 + (4 * 6 + 3) * 64 * (64 + 1 + 2)  # places; maps from c and from t, biases
    assert total == pretrained + ours
    trainable = total - sum(p.numel() for n, p in model.named_parameters() if n in frozen)
    if mode == "none":
        assert frozen == set()
    elif mode == "embeddings":
        assert frozen == VOCABULARY
        assert trainable == total - (VOCAB * 64 + 64 * 64 + 64 + VOCAB)
    else:
        learning = {n for n, p in model.named_parameters() if p.requires_grad}
        assert learning == {
            n
            for n in dict(model.named_parameters())
            if n.startswith(("projection.", "places")) or "modulation" in n
        }
        assert trainable == ours
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train_a_little(model, steps=2)
    after = dict(model.named_parameters())
    assert all(torch.equal(before[n], after[n]) for n in frozen)
    moved = {n for n in before if not torch.equal(before[n], after[n])}
    # Without a dropped row the null condition has no gradient; AdamW's decay leaves a zero alone.
    assert moved == set(before) - frozen - {"projection.null"}


def test_freeze_of_a_model_from_scratch() -> None:
    config = ModelConfig(layers=1, hidden=32, heads=2, ffn=32, vocab_size=40, mask_id=4, end_id=1)
    model = build(dataclasses.replace(config, freeze="embeddings"))
    assert isinstance(model, Denoiser)
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == {"tokens.weight", "bias"}
    freeze(model, "none")
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(UnembedError, match="name a masked LM with --backbone or a model with --start-from"):
        build(dataclasses.replace(config, freeze="backbone"))
    model = build(dataclasses.replace(config, freeze="backbone"), pretrained=False)  # weights come later
    frozen = {"tokens.weight", "bias"} | {
        f"blocks.0.{name}"
        for name in ("attention.qkv.weight", "attention.out.weight", "attention.q_scale", "attention.k_scale",
                     "up.weight", "down.weight")
    }  # fmt: skip
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == frozen
    with pytest.raises(UnembedError, match="did you mean 'embeddings'"):
        freeze(model, "embedings")  # type: ignore[arg-type]


# SPEC's arithmetic, in millions: embedding + layers x (layer + AdaLN) + projection and final AdaLN.
# What it leaves out (prediction head, bias, places, time) is within the 0.5 % of the comparison.
PAPER = [
    ("mmbert-22", "none", 388.07, 388.07),
    ("mmbert-22", "embeddings", 388.07, 191.47),
    ("mmbert-22", "backbone", 388.07, 22 * 3.543 + 3.15),
    ("mmbert-8", "none", 268.2, 268.2),
    ("mmbert-8", "embeddings", 268.2, 268.2 - 196.6),
    ("mmbert-8", "backbone", 268.2, 8 * 3.543 + 3.15),
    ("mmbert-2", "none", 216.9, 216.9),
    ("mmbert-2", "embeddings", 216.9, 20.27),
    ("mmbert-2", "backbone", 216.9, 2 * 3.543 + 3.15),
    # 250,002 x 769 + 8 x (4 x 768^2 + 2 x 768 x 3072 + AdaLN) + projection and a final AdaLN of 2.
    ("scratch-8", "none", 279.8, 279.8),
    ("scratch-8", "embeddings", 279.8, 87.6),
]


@pytest.mark.parametrize(("name", "mode", "total", "trainable"), PAPER)
def test_counts(name: str, mode: Freeze, total: float, trainable: float) -> None:
    started = time.process_time()
    counts = count(dataclasses.replace(preset(name).model, freeze=mode))
    assert time.process_time() - started < 1
    assert counts.total / 1e6 == pytest.approx(total, rel=0.005)
    assert counts.trainable / 1e6 == pytest.approx(trainable, rel=0.005)


def test_the_table_of_presets_in_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "presets.md").read_text(encoding="utf-8")
    main(["presets", "--json"])
    sizes: dict[str, list[int]] = {}
    for row in json.loads(capsys.readouterr().out):
        shape = f"`{row['name']}` | {row['layers']} | {row['hidden_size']} | {row['vocabulary']:,}"
        sizes.setdefault(shape, [row["total_parameters"]]).append(row["trainable_parameters"])
    expected = []
    for shape, counts in sizes.items():
        cells = [f"{n / 1e6:.2f} M" for n in counts] + ["none is pretrained"] * (4 - len(counts))
        expected.append(f"| {shape} | {' | '.join(cells)} |")
    assert [line for line in page.splitlines() if line.startswith("| `")] == expected


def test_architecture_alone_is_mmberts() -> None:
    """`pretrained=False` for a preset: mmBERT-base's speeds, and windows that no text here fills."""
    with torch.device("meta"):
        model = build(preset("mmbert-8").model, pretrained=False)
    assert isinstance(model, PretrainedDenoiser)
    thetas, windows = backbone._geometry(backbone._architecture(preset("mmbert-8").model), 8)
    assert set(thetas) == {160_000}
    assert [w < 100 for w in windows] == [False, True, True] * 2 + [False, True]
    assert isinstance(model.blocks[0].attn_norm, torch.nn.Identity)


def test_hub_out_of_reach(config: ModelConfig) -> None:
    with pytest.raises(UnembedError, match="could not be fetched from the hub") as caught:
        build(dataclasses.replace(config, backbone="jhu-clsp/mmBERT-base"))
    assert "jhu-clsp/mmBERT-base" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folder_without_a_model(config: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(UnembedError, match="holds no masked LM"):
        build(dataclasses.replace(config, backbone=str(tmp_path)))


def test_pickled_weights_are_refused(config: ModelConfig, lm_folder: Path, tmp_path: Path) -> None:
    lm_config().save_pretrained(tmp_path)
    lm = ModernBertForMaskedLM.from_pretrained(lm_folder)
    torch.save(lm.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UnembedError, match="pickled weights are not read"):
        build(dataclasses.replace(config, backbone=str(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden": 128}, ["hidden_size 64", "hidden is 128"]),
        ({"heads": 2}, ["num_attention_heads 4", "heads is 2"]),
        ({"ffn": 100}, ["intermediate_size 96", "ffn is 100"]),
        ({"vocab_size": 61}, ["vocab_size 60", "vocab_size is 61"]),
        ({"layers": 5}, ["has 4 layers", "layers is 5"]),
        ({"mask_id": 5}, ["mask token 4", "mask_id is 5"]),
        ({"mask_id": 60}, ["mask_id 60", "vocabulary of 60"]),
        ({"heads": 5}, ["hidden 64", "heads 5"]),
    ],
    ids=lambda v: "-".join(f"{k}{n}" for k, n in v.items()) if isinstance(v, dict) else "",
)
def test_mismatch_names_both(config: ModelConfig, changes: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(UnembedError) as caught:
        build(dataclasses.replace(config, **changes))
    assert all(words in str(caught.value) for words in named)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (BertConfig(), "of type bert, not modernbert"),
        (lm_config(mlp_bias=True), "mlp_bias True"),
        (
            lm_config(
                rope_parameters={
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            ),
            "rotary positions",
        ),
    ],
    ids=["type", "bias", "rope"],
)
def test_foreign_backbones_are_refused(config: ModelConfig, tmp_path: Path, other: Any, said: str) -> None:
    other.save_pretrained(tmp_path)
    with pytest.raises(UnembedError, match=said):
        build(dataclasses.replace(config, backbone=str(tmp_path)))


def test_encoder_without_its_head_is_refused(config: ModelConfig, tmp_path: Path) -> None:
    ModernBertModel(lm_config()).save_pretrained(tmp_path)
    with pytest.raises(UnembedError, match="not a whole masked LM"):
        build(dataclasses.replace(config, backbone=str(tmp_path)))
