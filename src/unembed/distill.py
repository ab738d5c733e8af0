"""Training a surrogate of an encoder on its vectors, and measuring how far the two agree.

It learns the vectors of texts and of edited copies of them. Knows prepared data, the surrogate and the
run; must not know of command lines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unembed.config import Config, ModelConfig, TrainConfig
from unembed.corpus import PreparedData
from unembed.edits import edited
from unembed.encoders import Encoder
from unembed.errors import UnembedError
from unembed.pairs import Batch, FreshSpans, Pairs, step_generator
from unembed.run import Group, Run, joined_group
from unembed.surrogate import DistilledEncoder, Surrogate
from unembed.train import (
    MODEL,
    STATE,
    TrainResult,
    Work,
    carry_out,
    claimed_folder,
    fit_to_data,
    flushed_denormals,
    open_pairs,
    resume_run,
    run_facts,
)

# What to train by default: under 16 MB in int8 with MiniLM's vocabulary.
DISTILLED = Config(
    model=ModelConfig(layers=5, hidden=384, heads=6, ffn=1536),
    train=TrainConfig(
        pairs="fresh",
        batch_size=1536,
        steps=100_000,
        optimizer="muon",
        learning_rate=4e-3,
        muon_rate=6e-3,
        weight_decay=0.0,
        warmup=100,
        decay="linear",
        decay_start=0.3,
        ema=0.99,
        validation=2_000,
        evaluate_every=1_000,
        save_every=5_000,
    ),
)
COPIED = 0.25  # share of a batch's spans that an edited copy is made of
MEASURED = 200  # validation texts of which the card tells the agreement


def count_content(ids: Tensor, *, end_id: int, pad_id: int) -> Tensor:
    """Tokens of content in each row (B, T) of content, end and padding."""
    return ((ids != end_id) & (ids != pad_id)).sum(1)


class NearTexts:
    """Fresh spans, and behind them edited copies of some, all embedded.

    A search climbs to wherever the surrogate errs in its favour, and its candidates are not the fluent
    text of a corpus: so the surrogate must have seen what the encoder makes of broken text.
    """

    def __init__(self, spans: FreshSpans, *, compile: bool = False) -> None:
        """Take spans, whose encoder embeds the copies, too."""
        self.spans, self.encoder = spans, spans.encoder
        function = getattr(spans.encoder, "id_function", None) if compile else None
        # Of one shape, like the spans; without the hint, a second shape would make the code general and slow.
        self._compiled = None if function is None else torch.compile(function(), dynamic=False)

    def batch(self, step: int, rows: slice) -> Batch:
        """The spans of that step, then copies of the first of them."""
        spans = self.spans
        ids, e = spans.batch(step, rows)
        first = ids[: int(len(ids) * COPIED)]
        if not len(first):
            return ids, e
        lengths = count_content(first, end_id=spans.end_id, pad_id=spans.pad_id)
        generator = step_generator(spans.seed, step, stream=4 + rows.start, device=spans.device)
        copies, lengths = edited(
            first, lengths, end_id=spans.end_id, pad_id=spans.pad_id, generator=generator
        )
        return torch.cat((ids, copies)), torch.cat((e, self._embed(copies, lengths)))

    def validation(self) -> Batch:
        """The pairs kept aside, without copies."""
        return self.spans.validation()

    def most_tokens(self, rows: int) -> int:
        """Bound the tokens of so many rows: a copy may be longer than its span."""
        return rows * self.spans.max_tokens

    def _embed(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Embed the copies."""
        if self._compiled is None:
            return self.encoder.encode_ids(ids, lengths)
        with torch.no_grad():
            return self._compiled(ids, lengths)


def open_near_pairs(
    config: Config, data: PreparedData, group: Group, *, trust_remote_code: bool = False
) -> Pairs:
    """Choose where batches come from; edited copies need an encoder at hand, which cached pairs do not."""
    pairs = open_pairs(config, data, group, trust_remote_code=trust_remote_code)
    return NearTexts(pairs, compile=config.train.compile) if isinstance(pairs, FreshSpans) else pairs


def distillation_loss(model: nn.Module, ids: Tensor, lengths: Tensor, e: Tensor) -> Tensor:
    """1 - cosine between the surrogate's guesses and the encoder's vectors e (B, E), the mean over rows."""
    return 1 - (model(ids, lengths) * F.normalize(e, dim=1)).sum(1).mean()


def distillation_step(run: Run, pairs: Pairs, loss_function: Callable[..., Tensor]) -> Tensor:
    """Take one optimisation step; return the loss over this process's rows."""
    m, group = run.config.model, run.group
    ids, e = pairs.batch(run.step, group.rows(run.config.train.batch_size))
    lengths = count_content(ids, end_id=m.end_id, pad_id=m.pad_id)
    with run.half():
        loss = loss_function(run.model, ids, lengths, e) / group.world
    loss.backward()
    run.apply_gradients()
    return loss.detach()


def begin_with_tokens(run: Run, encoder: Any) -> None:
    """Begin with the encoder's vectors of single tokens, reduced to the width of the token table.

    The first guess is then about the mean of the vectors of a text's tokens, instead of noise.
    """
    model: Any = run.model
    device, width = run.group.device, model.tokens.embedding_dim
    ids = torch.arange(model.config.vocab_size, device=device)[:, None]
    parts = [encoder.encode_ids(some, torch.ones_like(some[:, 0])) for some in ids.split(8192)]
    e = F.normalize(torch.cat(parts), dim=1)
    middle = e.mean(0)
    axes = torch.linalg.eigh((e - middle).mT @ (e - middle)).eigenvectors[:, -width:]  # (E, W)
    short = (e - middle) @ axes
    with torch.no_grad():
        model.tokens.weight[:, : short.shape[1]] = short / short.std()
        # Widened along orthogonal directions, and read along the same ones at the end.
        frame = torch.linalg.qr(model.widen.weight[:, : short.shape[1]].float()).Q  # (D, W)
        model.widen.weight[:, : short.shape[1]] = frame
        model.project.weight.copy_(axes @ frame.mT)
        model.project.bias.copy_(middle)
    run.average.load_state_dict(run.model.state_dict())


@torch.inference_mode()
def validate(run: Run, held_out: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Measure the averaged weights on the pairs kept aside."""
    m, (ids, e) = run.config.model, held_out
    lengths = count_content(ids, end_id=m.end_id, pad_id=m.pad_id)
    total = 0.0
    with run.half():
        for rows in torch.arange(len(ids), device=ids.device).split(1024):
            total += float(F.cosine_similarity(run.average(ids[rows], lengths[rows]), e[rows]).sum())
    return {"validation_loss": 1 - total / len(ids), "cosine": total / len(ids)}


def train_encoder(
    config: Config = DISTILLED,
    *,
    data: str | Path,
    out: str | Path,
    resume: bool = False,
    trust_remote_code: bool = False,
    show_progress: bool = False,
) -> TrainResult:
    """Train a distilled encoder on prepared data.

    Args:
        config: What to train and how (minutes, steps and the rest are in its `train`); sizes that the
            data fixes are taken from the data.
        data: A folder that `prepare` wrote: pairs, or passages whose spans the encoder embeds meanwhile.
        out: The run's folder: `model/` (the best weights, int8), `state/`, metrics.
        resume: Go on where the run in `out` stopped.
        trust_remote_code: Run the code an encoder brings.
        show_progress: Show a bar on stderr.

    Returns:
        Where the encoder is and how the run went; on Ctrl-C the state is saved and `interrupted` is set.
    """
    out = Path(out)
    prepared = PreparedData.open(Path(data))
    config = fit_to_data(config, prepared)
    if config.model.backbone:
        raise UnembedError("a distilled encoder has no backbone; leave --backbone out.")
    with flushed_denormals(), joined_group() as group, claimed_folder(out, group, resume=resume):
        run = Run(config, group=group, network=Surrogate, data=prepared.digest)
        if resume:
            resume_run(run, out / STATE)
        pairs = open_near_pairs(config, prepared, group, trust_remote_code=trust_remote_code)
        if isinstance(pairs, NearTexts) and not resume:
            begin_with_tokens(run, pairs.encoder)
        held_out = pairs.validation() if config.train.validation else None
        loss_function = torch.compile(distillation_loss) if config.train.compile else distillation_loss
        work = Work(
            step=lambda: distillation_step(run, pairs, loss_function),
            measure=None if held_out is None else partial(validate, run, held_out),
            save=lambda: _save(run, pairs, prepared, out / MODEL),
        )
        return carry_out(run, work, out, show_progress=show_progress)


def wrap(run: Run, prepared: PreparedData) -> DistilledEncoder:
    """Give the averaged weights the form that people use, with what there is to say of the run."""
    model = Surrogate(run.config.model)
    model.load_state_dict(run.average.state_dict())
    facts = run_facts(run, prepared)
    return DistilledEncoder(
        model, config=run.config, tokenizer=prepared.tokenizer, facts=facts, device=run.group.device
    )


def _save(run: Run, pairs: Pairs, prepared: PreparedData, folder: Path) -> None:
    """Write the averaged weights as an encoder people can load, with its agreement where it can be told."""
    encoder = wrap(run, prepared)
    if isinstance(pairs, NearTexts) and run.config.train.validation:
        texts = prepared.tokenizer.decode(pairs.validation()[0][:MEASURED].cpu().numpy())
        target: Any = pairs.encoder
        found = agreement(encoder, target, [t for t in texts if t.strip()])
        encoder.facts["agreement"] = [{"text": "validation passages", **found.figures()}]
    encoder.save_pretrained(folder)


@dataclass(frozen=True)
class Agreement:
    """How far a distilled encoder agrees with its target on texts that neither was fitted to here."""

    texts: int
    cosine: float  # between its vector of a text and the target's, the mean
    rank_correlation: float  # Spearman's, of the cosines of edited copies to the text's true vector
    first: float  # share of texts ranked before all their copies

    def figures(self) -> dict[str, Any]:
        """What a card says."""
        return {name.replace("_", " "): value for name, value in asdict(self).items()}


def agreement(
    distilled: DistilledEncoder, target: Encoder, texts: list[str],
    *, copies: int = 24, seed: int = 0, batch_size: int = 256,
) -> Agreement:  # fmt: skip
    """Compare a distilled encoder with its target, on texts and on edited copies of each.

    Args:
        distilled: The one that is measured.
        target: The one it stands for.
        texts: Held-out texts; longer ones are cut.
        copies: Copies of each text, with 1 to 6 edits.
        seed: Of the edits.
        batch_size: Texts that an encoder takes at once.
    """
    tokenizer = distilled.tokenizer
    encoded = tokenizer.encode(texts, max_tokens=distilled.max_tokens)
    ids = torch.from_numpy(encoded.ids).repeat_interleave(copies, 0)
    lengths = torch.from_numpy(encoded.lengths).repeat_interleave(copies)
    generator = torch.Generator().manual_seed(seed)
    rows, _ = edited(ids, lengths, end_id=tokenizer.end_id, pad_id=tokenizer.pad_id, generator=generator)
    # As text, so that each encoder reads what a search would show it.
    near = np.array(tokenizer.decode(rows.numpy()), dtype=object).reshape(len(texts), copies)
    groups = [
        [text, *dict.fromkeys(t for t in mine if t.strip() and t != text)]
        for text, mine in zip(tokenizer.decode(encoded.ids), near.tolist(), strict=True)
    ]
    flat = [text for group in groups for text in group]
    mine, true = (
        F.normalize(torch.from_numpy(encoder.encode(flat, batch_size=batch_size)), dim=1)
        for encoder in (distilled, target)
    )
    cosine, correlation, first = [], [], []
    begin = 0
    for group in groups:
        s, e = (vectors[begin : begin + len(group)] for vectors in (mine, true))
        begin += len(group)
        guessed, actual = (s @ e[0]).numpy(), (e @ e[0]).numpy()
        cosine.append(float(guessed[0]))
        if len(group) > 3:
            correlation.append(spearman(guessed[1:], actual[1:]))
        first.append(bool(guessed[0] >= guessed.max()))
    return Agreement(
        len(texts), float(np.mean(cosine)), float(np.mean(correlation or [np.nan])), float(np.mean(first))
    )


def spearman(left: np.ndarray, right: np.ndarray) -> float:
    """Rank correlation; ties share their mean rank; 0 where one side is all ties.

    >>> spearman(np.array([1.0, 2.0, 3.0]), np.array([10.0, 30.0, 20.0]))
    0.5
    """
    a, b = (_ranks(values) for values in (left, right))
    a, b = a - a.mean(), b - b.mean()
    norm = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / norm if norm else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    """Rank of each value, the mean one among equals."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]
