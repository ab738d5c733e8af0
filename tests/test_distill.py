"""distill: the loss, the same bits after a stop, what a run leaves, agreement, the command, the search."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tabled import TabledEncoder
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from unembed import distill, encoders
from unembed.cli import main
from unembed.config import Config, ModelConfig, TrainConfig
from unembed.corpus import PreparedData, prepare
from unembed.distill import (
    COPIED,
    NearTexts,
    agreement,
    begin_with_tokens,
    count_content,
    distillation_loss,
    distillation_step,
    spearman,
    train_encoder,
)
from unembed.errors import UnembedError
from unembed.inverter import Inverter
from unembed.model import Denoiser
from unembed.pairs import FreshSpans
from unembed.run import Group, Run
from unembed.surrogate import DistilledEncoder, Surrogate
from unembed.tokens import TextTokenizer
from unembed.train import fit_to_data

T, E = 8, 16
WORDS = [a + b for a in "bdgkm" for b in "aeiou"]
ALONE = Group(0, 1, torch.device("cpu"))
CONFIG = Config(
    model=ModelConfig(layers=1, hidden=32, heads=2, ffn=64),
    train=TrainConfig(
        pairs="fresh", batch_size=16, steps=40, optimizer="muon", learning_rate=1e-2, muon_rate=1e-2,
        weight_decay=0.0, warmup=5, decay="linear", ema=0.9, validation=8, evaluate_every=20, save_every=15,
    ),
)  # fmt: skip


def word_tokenizer() -> TextTokenizer:
    """Build a vocabulary of 25 words."""
    vocabulary = {t: i for i, t in enumerate(["[PAD]", "[SEP]", "[MASK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return TextTokenizer.wrap(tokenizer, name="words")


class FakeEncoder(TabledEncoder):
    """A random vector for each token, and less of one for its place."""

    def __init__(self, name: str = "fake", size: int = E) -> None:
        generator = torch.Generator().manual_seed(0)
        self.words = torch.randn(28, 1, size, generator=generator)
        table = self.words + 0.5 * torch.randn(28, T, size, generator=generator)
        super().__init__(table, word_tokenizer(), name=name)


def made_up(count: int, longest: int, seed: int = 0) -> list[str]:
    """Return texts of random words."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, n)) for n in rng.integers(3, longest, count)]


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "load_encoder", lambda name, **_: FakeEncoder(name))


@pytest.fixture(scope="module")
def passages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 passages."""
    folder = tmp_path_factory.mktemp("passages")
    return prepare(
        made_up(60, 30), encoder=FakeEncoder(), out=folder, max_tokens=T, kind="passages",
        source_names=["made up"],
    ).path  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 pairs."""
    folder = tmp_path_factory.mktemp("pairs")
    return prepare(made_up(60, 8), encoder=FakeEncoder(), out=folder, max_tokens=T).path


@pytest.fixture(scope="module")
def trained(passages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run long enough to learn something."""
    out = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoders, "load_encoder", lambda name, **_: FakeEncoder(name))
        train_encoder(CONFIG.override(steps=200), data=passages, out=out / "run")
    return out / "run"


# --- the loss -------------------------------------------------------------------------------------


class Guess(nn.Module):
    """A model that always says the same."""

    def __init__(self, vectors: Tensor) -> None:
        super().__init__()
        self.vectors = vectors

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return self.vectors


def test_the_loss_is_one_minus_the_cosine_whatever_the_length() -> None:
    e = 3 * torch.randn(4, E, generator=torch.Generator().manual_seed(0))
    truth = nn.functional.normalize(e, dim=1)
    nothing = torch.zeros(4, 1, dtype=torch.long)
    assert abs(float(distillation_loss(Guess(truth), nothing, nothing[:, 0], e))) < 1e-6
    truth[3] *= -1
    assert float(distillation_loss(Guess(truth), nothing, nothing[:, 0], e)) == pytest.approx(0.5)


def test_copies_are_edited_and_embedded(passages: Path) -> None:
    spans = FreshSpans(
        PreparedData.open(passages), encoder=FakeEncoder(), batch_size=40, validation=8, seed=0, device="cpu"
    )
    near = NearTexts(spans)
    ids, e = near.batch(3, slice(0, 40))
    count = int(40 * COPIED)
    assert len(ids) == len(e) == 40 + count
    lengths = count_content(ids, end_id=1, pad_id=0)
    assert torch.allclose(e, FakeEncoder().encode_ids(ids, lengths), atol=1e-5)
    plain, _ = spans.batch(3, slice(0, 40))
    assert torch.equal(ids[:40], plain)
    # A copy is not its text, but shares more with it than with the others.
    assert (ids[40:] != ids[:count]).any(1).float().mean() > 0.8
    words = [set(row[row > 2].tolist()) for row in ids]
    own = np.mean([len(words[i] & words[40 + i]) for i in range(count)])
    others = np.mean([len(words[i - 1] & words[40 + i]) for i in range(count)])
    assert own > 1.5 * others
    assert torch.equal(near.batch(3, slice(0, 40))[0], ids)
    assert not torch.equal(near.batch(4, slice(0, 40))[0], ids)
    assert len(near.batch(3, slice(0, 2))[0]) == 2  # too few for a copy


def test_copies_are_made_of_spliced_spans_too(passages: Path) -> None:
    prepared = PreparedData.open(passages)
    plain, near = (
        distill.open_near_pairs(fit_to_data(CONFIG.override(splice_share=share), prepared), prepared, ALONE)
        for share in (0.0, 1.0)
    )
    assert isinstance(near, NearTexts)
    rows = slice(0, 16)
    (ids, e), (before, _) = near.batch(0, rows), plain.batch(0, rows)
    spliced = (ids[:16] != before[:16]).any(1)
    assert spliced.float().mean() > 0.7
    lengths = count_content(ids, end_id=1, pad_id=0)
    torch.testing.assert_close(e, FakeEncoder().encode_ids(ids, lengths))
    # Copies may be longer than what they are made of, so the bound is that of full rows.
    assert near.most_tokens(len(ids)) == len(ids) * T >= int((ids != 0).sum())


def test_beginning_with_tokens_beats_beginning_with_noise(passages: Path) -> None:
    config = CONFIG.override(vocab_size=28, mask_id=2, end_id=1, pad_id=0, max_tokens=T, embedding_size=E)
    run = Run(config, group=ALONE, network=Surrogate)
    encoded = word_tokenizer().encode(made_up(50, 8, seed=1), max_tokens=T)
    ids, lengths = torch.from_numpy(encoded.ids), torch.from_numpy(encoded.lengths)
    e = FakeEncoder().encode_ids(ids, lengths)

    def cosine(model: Any) -> float:
        with torch.no_grad():
            return float(nn.functional.cosine_similarity(model(ids, lengths), e).mean())

    noise = cosine(run.model)
    begin_with_tokens(run, FakeEncoder())
    assert cosine(run.model) > noise + 0.2
    assert cosine(run.average) == cosine(run.model)


# --- a run ----------------------------------------------------------------------------------------


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Read the metrics of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_and_says_how_well(trained: Path) -> None:
    encoder = DistilledEncoder.from_pretrained(trained / "model", device="cpu")
    assert encoder.target == "fake" and encoder.max_tokens == T
    measured = [row["cosine"] for row in rows_of(trained) if "cosine" in row]
    assert len(measured) == 10 and measured[-1] > 0.85 > measured[0]
    assert [row for row in rows_of(trained) if "loss" in row]
    assert encoder.facts["data"] == ["made up"]
    assert encoder.facts["training"]["steps"] <= 200
    (card,) = encoder.facts["agreement"]
    # The card's figures are those of the saved weights, on text that was kept aside.
    found = agreement(encoder, FakeEncoder(), made_up(40, 8, seed=7))
    assert card["cosine"] == pytest.approx(found.cosine, abs=0.08)
    assert found.rank_correlation > 0.75 and found.first > 0.4  # of 25 texts, 1 in 25 by chance
    assert "cosine" in (trained / "model" / "README.md").read_text()


def test_a_stopped_run_ends_in_the_same_bits(
    passages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(run: Run, *args: Any) -> Tensor:
        loss = distillation_step(run, *args)
        if run.step == 16:
            signal.raise_signal(signal.SIGINT)
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(distill, "distillation_step", step)
        stopped = train_encoder(CONFIG, data=passages, out=tmp_path / "stopped")
    assert stopped.interrupted and stopped.steps == 17
    assert DistilledEncoder.from_pretrained(stopped.model, device="cpu").size == E
    assert not train_encoder(CONFIG, data=passages, out=tmp_path / "stopped", resume=True).interrupted
    train_encoder(CONFIG, data=passages, out=tmp_path / "whole")
    for name in ("model", "average", "optimizers"):
        a, b = (load_file(tmp_path / run / "state" / f"{name}.safetensors") for run in ("stopped", "whole"))
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a), name
    kinds = [[(r["step"], "loss" in r) for r in rows_of(tmp_path / run)] for run in ("stopped", "whole")]
    assert kinds[0] == kinds[1]


def test_cached_pairs_need_no_encoder(pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, **_: Any) -> None:
        pytest.fail("the encoder was asked for")

    monkeypatch.setattr(encoders, "load_encoder", refuse)
    config = CONFIG.override(pairs="cached", steps=60)
    result = train_encoder(config, data=pairs, out=tmp_path / "run")
    assert result.validation_loss is not None and result.validation_loss < 0.6
    assert "agreement" not in DistilledEncoder.from_pretrained(result.model, device="cpu").facts


def test_minutes_end_a_run(pairs: Path, tmp_path: Path) -> None:
    config = CONFIG.override(pairs="cached", minutes=0.001, steps=100_000, validation=0)
    result = train_encoder(config, data=pairs, out=tmp_path / "run")
    assert 0 < result.steps < 1000 and result.validation_loss is None
    assert DistilledEncoder.from_pretrained(result.model, device="cpu").size == E


def test_bad_runs(passages: Path, pairs: Path, trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UnembedError, match="holds a run already; add --resume"):
        train_encoder(CONFIG, data=passages, out=trained)
    with pytest.raises(UnembedError, match="holds no run to resume"):
        train_encoder(CONFIG, data=passages, out=tmp_path / "none", resume=True)
    with pytest.raises(UnembedError, match="the run was started with hidden = 32, not 64"):
        train_encoder(CONFIG.override(hidden=64), data=passages, out=trained, resume=True)
    with pytest.raises(UnembedError, match="the run was started on other data"):
        train_encoder(CONFIG.override(pairs="cached"), data=pairs, out=trained, resume=True)
    with pytest.raises(UnembedError, match="the run has diverged: at step 15 .* nothing was saved yet"):
        spoilt = CONFIG.override(pairs="cached", learning_rate=1e30, muon_rate=1e30, evaluate_every=100)
        train_encoder(spoilt, data=pairs, out=tmp_path / "diverged")
    with pytest.raises(UnembedError, match="holds ready pairs; train with --pairs cached"):
        train_encoder(CONFIG, data=pairs, out=tmp_path / "fresh")
    with pytest.raises(UnembedError, match="a distilled encoder has no backbone"):
        train_encoder(
            replace(CONFIG, model=replace(CONFIG.model, backbone="bert", vocab_size=28)),
            data=passages, out=tmp_path / "backbone",
        )  # fmt: skip


# --- agreement ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 2, 3], [1, 2, 2, 3], 1.0),
        ([1, 1, 2], [1, 2, 3], 3**0.5 / 2),  # ranks 1.5, 1.5, 3
        ([5, 5, 5], [1, 2, 3], 0.0),
    ],
)
def test_spearman(left: list[float], right: list[float], expected: float) -> None:
    assert spearman(np.array(left), np.array(right)) == pytest.approx(expected)


def test_agreement_is_full_with_itself_and_poor_with_noise(trained: Path) -> None:
    encoder = DistilledEncoder.from_pretrained(trained / "model", device="cpu")
    texts = made_up(20, 8, seed=3)
    itself = agreement(encoder, encoder, texts, copies=12)
    assert itself.cosine == pytest.approx(1, abs=1e-5) and itself.first == 1.0 and itself.texts == 20
    assert itself.rank_correlation == pytest.approx(1)

    class Noise(FakeEncoder):
        def encode(self, texts: Sequence[str], **_: Any) -> np.ndarray:
            return np.random.default_rng(0).standard_normal((len(texts), E)).astype(np.float32)

    noise = agreement(encoder, Noise(), texts, copies=12)
    assert abs(noise.cosine) < 0.3 and abs(noise.rank_correlation) < 0.3 and noise.first < 0.5
    again = agreement(encoder, Noise(), texts, copies=12)
    assert noise == again


# --- the search -----------------------------------------------------------------------------------


def open_inverter(name: str = "fake", size: int = E, length: int = T) -> Inverter:
    config = Config().override(
        encoder=name, layers=1, hidden=32, heads=2, ffn=64, vocab_size=28, mask_id=2, end_id=1, pad_id=0,
        max_tokens=length, embedding_size=size, adaln_rank=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Denoiser(config.model)
    return Inverter(model, config=config, tokenizer=word_tokenizer(), device="cpu")


def test_a_search_without_the_encoder(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = FakeEncoder()
    vectors = truth.encode(made_up(4, 8, seed=5))

    def refuse(*_: Any, **__: Any) -> None:
        raise UnembedError("the encoder is far away.")

    monkeypatch.setattr(encoders, "load_encoder", refuse)
    inverter = open_inverter()
    options: dict[str, Any] = {"seed": 0, "rounds": 8, "candidates": 24, "steps": 4}
    drafts = inverter.invert(vectors, seed=0, steps=4)
    found = inverter.invert(vectors, refine="distilled", distilled=trained / "model", **options)
    for one in found:
        assert one.ranked_by == "distilled fake" and one.exact is None and one.encoder_calls > 24
        assert one.cosine is not None and 0 < one.cosine <= 1
    # By the true encoder, too, the texts found are nearer than the drafts.
    for draft, one, vector in zip(drafts, found, vectors, strict=True):
        near = [truth.encode([i.text])[0] if i.text else np.ones(E) for i in (draft, one)]
        cosines = [float(v @ vector / np.linalg.norm(v) / np.linalg.norm(vector)) for v in near]
        assert cosines[1] > cosines[0]
    # The one given stays; an encoder given beside it is not asked.
    again = inverter.invert(vectors, refine="distilled", encoder=truth, **options)
    assert again == found
    *_, last = inverter.search(vectors[0], refine="distilled", **options)
    assert (last.text, last.exact) == (found[0].text, False)


def test_reconstruct_embeds_with_the_encoder_and_searches_without(trained: Path) -> None:
    class Counting(FakeEncoder):
        asked = 0

        def encode(self, texts: Sequence[str], **options: Any) -> np.ndarray:
            self.asked += len(texts)
            return super().encode(texts)

        def encode_ids(self, ids: Tensor, lengths: Tensor) -> Tensor:
            self.asked += len(ids)
            return super().encode_ids(ids, lengths)

    truth = Counting()
    (found,) = open_inverter().reconstruct(
        "ba de gi ko",
        encoder=truth,
        refine="distilled",
        distilled=trained / "model",
        seed=0,
        rounds=3,
        steps=4,
    )
    assert found.inversion.ranked_by == "distilled fake"
    assert truth.asked <= 4  # the text, and what came back, each of them once by way of ids


def test_no_belief_without_the_encoder(trained: Path) -> None:
    """Even a vector of the distilled encoder's own, whose cosine reaches 1, is not believed found."""
    encoder = DistilledEncoder.from_pretrained(trained / "model", device="cpu")
    vectors = encoder.encode(["ba"])
    inverter = open_inverter()
    (found,) = inverter.invert(vectors, refine="distilled", distilled=encoder, seed=0, rounds=40, steps=4)
    *_, last = inverter.search(vectors, refine="distilled", seed=0, rounds=40, steps=4)
    assert found.cosine == pytest.approx(1, abs=1e-4) and found.exact is None and last.exact is False


def test_a_distilled_encoder_must_fit(trained: Path) -> None:
    with pytest.raises(UnembedError, match="there is no distilled encoder for fake at hand"):
        open_inverter().invert(np.ones(E), refine="distilled")
    with pytest.raises(UnembedError, match="stands for fake, but this model inverts vectors of true"):
        open_inverter("true").invert(np.ones(E), refine="distilled", distilled=trained / "model")
    with pytest.raises(UnembedError, match="gives vectors of 16 numbers, but this model inverts those of"):
        open_inverter(size=5).invert(np.ones(5), refine="distilled", distilled=trained / "model")
    with pytest.raises(UnembedError, match="reads 8 tokens, but this model writes up to 12"):
        open_inverter(length=12).invert(np.ones(E), refine="distilled", distilled=trained / "model")


# --- the command line -----------------------------------------------------------------------------


def test_train_encoder_on_the_command_line(
    passages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    small = "--layers 1 --hidden 32 --heads 2 --ffn 64 --steps 12 --batch-size 8 --validation 4".split()
    small += ["--splice-share", "0.5", "--swap-share", "0.25"]
    main(["train-encoder", str(passages), "-o", str(out), *small, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] == 12 and Path(result["model"]) == out / "model"
    saved = json.loads((out / "model" / "encoder.json").read_text())["train"]
    assert (saved["splice_share"], saved["swap_share"]) == (0.5, 0.25)
    main(["train-encoder", str(passages), "-o", str(out), "--resume", "--steps", "16"])
    said = capsys.readouterr()
    assert ": 16 steps in " in said.out and "--refine distilled --distilled" in said.err

    inverter = tmp_path / "inverter"
    open_inverter().save_pretrained(inverter)
    np.save(tmp_path / "vectors.npy", FakeEncoder().encode(["ba de gi ko"]))
    command = ["invert", str(tmp_path / "vectors.npy"), "--model", str(inverter), "--refine", "distilled"]
    command += ["--rounds", "2", "--seed", "0", "--device", "cpu", "--steps", "4", "--json"]
    main([*command, "--distilled", str(out / "model")])
    (found,) = json.loads(capsys.readouterr().out)
    assert found["ranked_by"] == "distilled fake" and found["exact"] is None


INVERT = ["invert", "v.npy", "--model", "INVERTER"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train-encoder", "nowhere", "-o", "out"], "nowhere"),
        (["train-encoder", "DATA", "-o", "out", "--resume"], "out holds no run to resume"),
        (["train-encoder", "DATA", "-o", "out", "--layers", "0"], "layers must be at least 1, not 0."),
        (["invert", "v.npy", "--distilled", "x"], "--distilled concerns a search; add --refine distilled"),
        (["invert", "v.npy", "--refine", "encoder", "--distilled", "x"], "--distilled goes with"),
        ([*INVERT, "--refine", "distilled", "--distilled", "x"], "no distilled encoder for x at hand"),
        ([*INVERT, "--refine", "distilled"], "there is no distilled encoder for fake at hand"),
    ],
)  # fmt: skip
def test_bad_commands(
    arguments: list[str],
    sentence: str,
    passages: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("v.npy", np.ones((1, E), np.float32))
    open_inverter().save_pretrained("inverter")
    places = {"DATA": str(passages), "INVERTER": "inverter"}
    with pytest.raises(SystemExit) as stop:
        main([places.get(argument, argument) for argument in arguments])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and sentence in said and said.count("\n") == 1
