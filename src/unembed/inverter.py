"""`Inverter`: vectors in, text out. What users hold.

Joins a checkpoint, a model, the decoding loop and the search; it must not know of training, nor how vectors
are checked (`vectors`) and what was found is made readable (`readable`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from torch import Tensor

from unembed.backbone import build
from unembed.checkpoint import Checkpoint, find_checkpoint, load_checkpoint, load_into, save_checkpoint
from unembed.config import Config, Precision
from unembed.crew import crew_size, finish, share
from unembed.decode import DecodeOptions, Draft, FittedOptions, Model, decode
from unembed.engine import Numbers, fast_int8, find_device, prepare
from unembed.errors import UnembedError, check_batch_size, unknown_name
from unembed.logbook import progress
from unembed.readable import read_draft, read_round, read_standing, read_step
from unembed.reader import Guesses, Reader
from unembed.results import Inversion, Reconstruction, Round, Step
from unembed.search import Refine, Searcher, SearchOptions
from unembed.strategies import AUTO
from unembed.surrogate import DistilledEncoder
from unembed.tokens import TextTokenizer
from unembed.vectors import Vectors, check_vectors, similarity

if TYPE_CHECKING:
    from unembed.encoders import Encoder

DEFAULT_MODEL = "all-MiniLM-L6-v2"


class Inverter:
    """Turns vectors of one encoder back into text."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        config: Config,
        tokenizer: TextTokenizer,
        facts: dict[str, Any] | None = None,
        device: str | torch.device | None = None,
        precision: Precision | Numbers = "auto",
    ) -> None:
        """Wrap a model; most people want `from_pretrained`."""
        if precision not in (known := ("auto", *get_args(Numbers))):
            raise unknown_name("precision", str(precision), known)
        self.device = find_device(device)
        self.model = model.to(self.device).eval()
        self.model.hears = config.train.bag_weight > 0  # type: ignore[assignment]
        self.model.embeds = config.diffusion.embed_share > 0  # type: ignore[assignment]
        self.config, self.tokenizer, self.facts = config, tokenizer, dict(facts or {})
        own: Numbers = "bf16" if self.device.type == "cuda" else "fp32"
        self.numbers: Numbers = own if precision == "auto" else precision
        self._ready: Model | None = None
        self._encoder: Encoder | None = None
        self._distilled: DistilledEncoder | None = None
        self._reader: Reader | None = None

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path = DEFAULT_MODEL,
        device: str | torch.device | None = None,
        *,
        precision: Precision | Numbers = "auto",
    ) -> Inverter:
        """Load a bundled model by name, a folder, or a hub id.

        Args:
            name_or_path: Which model.
            device: "cpu", "cuda", ...; a GPU if there is one.
            precision: `auto` is bf16 on GPUs; on CPUs int8 where the weights are and the CPU multiplies
                bytes (`engine.fast_int8`), some 2.5 times as fast as the fp32 that it is elsewhere. `bf16`
                on a CPU is 1.8 times as fast, but results may depend on the batch size where two tokens
                are all but equally likely. Between them, answers differ where a choice is close.
        """
        device = find_device(device)
        checkpoint = load_checkpoint(find_checkpoint(name_or_path))
        with torch.device("meta"):
            model = build(checkpoint.config.model, pretrained=False)
        load_into(model, checkpoint.weights, source=str(name_or_path))
        if precision == "auto" and checkpoint.int8 and device.type == "cpu" and fast_int8():
            precision = "int8"
        return cls(
            model,
            config=checkpoint.config,
            tokenizer=checkpoint.tokenizer,
            facts=checkpoint.facts,
            device=device,
            precision=precision,
        )

    @property
    def encoder_name(self) -> str:
        """Name of the encoder whose vectors this inverts."""
        return self.config.encoder

    @property
    def size(self) -> int:
        """Numbers in a vector."""
        return self.config.model.embedding_size

    @property
    def max_tokens(self) -> int:
        """Longest text, in tokens."""
        return self.config.model.max_tokens

    def encoder(self) -> Encoder:
        """Load the encoder this model belongs to, once."""
        if self._encoder is None:
            from unembed.encoders import load_encoder

            self._encoder = load_encoder(self.encoder_name, device=str(self.device))
        return self._encoder

    def distilled(self, which: DistilledEncoder | str | Path | None = None) -> DistilledEncoder:
        """Load a distilled encoder, which stands in for this model's encoder in a search.

        Args:
            which: One that is loaded, or its folder, to use from now on; by default the last one given,
                else the one that comes with the package.
        """
        if which is not None or self._distilled is None:
            if not isinstance(which, DistilledEncoder):
                which = DistilledEncoder.from_pretrained(which or self.encoder_name, device=self.device)
            self.check_encoder(which)
            if which.target != self.encoder_name:
                raise UnembedError(
                    f"this distilled encoder stands for {which.target}, but this model inverts vectors of "
                    f"{self.encoder_name}; give the one trained for it."
                )
            if which.max_tokens < self.max_tokens:
                raise UnembedError(
                    f"this distilled encoder reads {which.max_tokens} tokens, but this model writes up to "
                    f"{self.max_tokens}; train one on data prepared with that length."
                )
            self._distilled = which
        return self._distilled

    def guesses(self) -> Guesses:
        """What this model itself thinks of texts' vectors, in the place of its encoder in a search."""
        if not getattr(self.ready, "embeds", False):
            raise UnembedError(
                "refine 'self' needs a model that was taught to guess vectors; train one with embeds and "
                "embed_share, as the preset small does, refine by 'distilled', or leave refine out."
            )
        return Guesses(self.ready, self.tokenizer, self.encoder_name)

    def invert(
        self,
        vectors: Vectors,
        strategy: str = AUTO,
        steps: int | None = None,
        temperature: float | None = None,
        guidance: float = 1.0,
        seed: int | None = None,
        batch_size: int = 64,
        show_progress: bool = False,
        *,
        first: int = 0,
        refine: Refine | None = None,
        encoder: Encoder | None = None,
        distilled: DistilledEncoder | str | Path | None = None,
        rounds: int = SearchOptions.rounds,
        candidates: int = SearchOptions.candidates,
        pool: int = SearchOptions.pool,
        budget: int | None = None,
        on_batch: Callable[[list[Inversion]], None] | None = None,
        **knobs: Any,
    ) -> list[Inversion]:
        """Recover a text from each vector.

        Args:
            vectors: One (E,) or many (N, E), numpy or torch; their length does not matter.
            strategy: One of `STRATEGIES`; `causal` and `beam` are for models that read left to right. `auto`
                is the model's best: `beam` if it reads so (`causal` if it has to draw, at a temperature),
                else `confidence`, and `confidence` if you give fewer `steps` than it has tokens, or `drafts`.
            steps: Passes through the model, from 1 to its number of tokens, 8 by default; left to right
                (`beam`, `causal`) always one a token.
            temperature: 0 for the most likely tokens; None for the strategy's own, which is 0
                but for the two `euler` strategies, which draw from the model at 1; 0.7 for several drafts.
            guidance: 1 for the model as it is; more leans harder on the vector, at two passes a step.
            seed: The same seed gives the same text, whatever the batch size.
            batch_size: Vectors decoded together.
            show_progress: Show a bar on stderr.
            first: Number of the first vector among all that are inverted with this seed, in several calls.
            refine: `encoder` to search for a text whose embedding is the vector; `self` to do so without
                the encoder, by the model's own guess of it, `distilled` by a small network's; None for a
                single draft.
            encoder: Who ranks the candidates of a search; the encoder this model belongs to by default.
            distilled: The small network, or its folder; the one that comes with the package by default.
            rounds: Rounds of a search; texts that are found leave it earlier.
            candidates: New texts a round.
            pool: Texts kept from round to round.
            budget: Most texts that may be embedded to find one; None for no limit but the rounds'.
            on_batch: Given what was found of each batch as soon as it is done, for who may be stopped.
            knobs: `remask`, `restart`, `reveal`, `beams`, `looks`, `drafts`, see `DecodeOptions`.
        """
        options = _options(strategy, steps, temperature, guidance, knobs).fit(self.config.model)
        check_batch_size(batch_size)
        e = self.check_vectors(vectors)
        seed = _fresh_seed() if seed is None else seed
        searcher, each, unit = None, 1, "batches"
        if refine is not None:
            search = SearchOptions(refine, rounds, candidates, pool, budget, seed)
            searcher, each, unit = self._searcher(encoder, distilled, options, search), rounds + 1, "rounds"
        found: list[Inversion] = []
        starts = range(0, len(e), batch_size)
        with progress(f"inverting ({unit})", total=len(starts) * each, show=show_progress) as advance:
            for start in starts:
                batch = e[start : start + batch_size]
                if searcher is None:
                    done = self._finish(batch, first + start, options, seed)
                    advance(1)
                else:
                    done = self._refine(batch, first + start, searcher, advance)
                found += done
                if on_batch is not None:
                    on_batch(done)
        return found

    def stream(
        self,
        vector: Vectors,
        strategy: str = AUTO,
        steps: int | None = None,
        temperature: float | None = None,
        guidance: float = 1.0,
        seed: int | None = None,
        **knobs: Any,
    ) -> Iterator[Step]:
        """Yield the draft of one vector after each step; the last is what `invert` returns."""
        options = _options(strategy, steps, temperature, guidance, knobs).fit(self.config.model)
        e = self.check_vectors(vector)
        if len(e) != 1:
            raise UnembedError(f"stream takes one vector, not {len(e)}; use invert for many.")
        drafts = self._drafts(e, 0, options, _fresh_seed() if seed is None else seed)
        read = partial(read_step, total=options.steps, tokenizer=self.tokenizer, config=self.config.model)
        return (read(draft, index=index) for index, draft in enumerate(drafts, 1))

    def search(
        self,
        vector: Vectors,
        *,
        encoder: Encoder | None = None,
        distilled: DistilledEncoder | str | Path | None = None,
        refine: Refine = "encoder",
        rounds: int = SearchOptions.rounds,
        candidates: int = SearchOptions.candidates,
        pool: int = SearchOptions.pool,
        budget: int | None = None,
        strategy: str = AUTO,
        steps: int | None = None,
        temperature: float | None = None,
        guidance: float = 1.0,
        seed: int | None = None,
        **knobs: Any,
    ) -> Iterator[Round]:
        """Yield where the search for one vector's text stands: after the drafts, then after each round.

        The last is what `invert` with the same options returns. Ends early when the text is found, or
        the budget spent.
        """
        options = _options(strategy, steps, temperature, guidance, knobs).fit(self.config.model)
        e = self.check_vectors(vector)
        if len(e) != 1:
            raise UnembedError(f"search takes one vector, not {len(e)}; use invert for many.")
        seed = _fresh_seed() if seed is None else seed
        search = SearchOptions(refine, rounds, candidates, pool, budget, seed)
        standings = self._searcher(encoder, distilled, options, search).run(e)
        read = partial(read_round, total=rounds, known=refine == "encoder", tokenizer=self.tokenizer)
        return (read(standing, index=index) for index, standing in enumerate(standings))

    def reconstruct(
        self,
        texts: str | Sequence[str],
        *,
        encoder: Encoder | None = None,
        batch_size: int = 64,
        **options: Any,
    ) -> list[Reconstruction]:
        """Embed texts, forget them, recover them from the vectors alone, and compare.

        Texts longer than the model are cut first, with a warning. `options` go to `invert`.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        encoder = encoder or self.encoder()
        self.check_encoder(encoder)
        cut = self.tokenizer.encode(texts, max_tokens=self.max_tokens)
        if cut.truncated.any():
            warnings.warn(
                f"{int(cut.truncated.sum())} of {len(texts)} texts are longer than {self.max_tokens} "
                "tokens and were cut.",
                stacklevel=2,
            )
        vectors = encoder.encode(cut.texts, batch_size=batch_size)
        if options.get("refine") is not None:
            options["encoder"] = encoder
        found = self.invert(vectors, batch_size=batch_size, **options)
        cosines = similarity(encoder, vectors, [i.text for i in found])
        return [
            Reconstruction(text, inversion, float(cosine))
            for text, inversion, cosine in zip(cut.texts, found, cosines, strict=True)
        ]

    def check_encoder(self, encoder: Encoder) -> None:
        """Refuse an encoder whose vectors have another size."""
        if encoder.size != self.size:
            raise UnembedError(
                f"encoder {encoder.name} gives vectors of {encoder.size} numbers, but this model inverts "
                f"those of {self.encoder_name}, of {self.size}; choose the model trained for your encoder."
            )

    def _searcher(
        self, encoder: Encoder | None, distilled: DistilledEncoder | str | Path | None,
        decoding: FittedOptions, search: SearchOptions,
    ) -> Searcher:  # fmt: skip
        """Join the model with whoever ranks its candidates."""
        chosen: Encoder | Guesses
        match search.refine:
            case "self":
                chosen = self.guesses()
            case "distilled":
                chosen = self.distilled(distilled)
            case "encoder":
                chosen = self._ranker(encoder)
        if self._reader is None or self._reader.encoder != chosen:
            self._reader = Reader(chosen, self.tokenizer)
        return Searcher(self.ready, self._reader, self.config.diffusion, decoding, search)

    def _ranker(self, encoder: Encoder | None) -> Encoder:
        """Choose the encoder that ranks candidates: the one given, if it is this model's, or its own."""
        if encoder is None:
            try:
                encoder = self.encoder()
            except UnembedError as error:
                raise UnembedError(
                    f"refine='encoder' needs the encoder {self.encoder_name} at hand, but {error} "
                    "Pass it as encoder=, use refine='self' or 'distilled', or leave refine out."
                ) from error
        self.check_encoder(encoder)
        if encoder.name != self.encoder_name:
            raise UnembedError(
                f"the candidates would be ranked by {encoder.name}, but this model inverts vectors of "
                f"{self.encoder_name}; pass that encoder (or its name, if it is the same one)."
            )
        return encoder

    def save_pretrained(self, path: str | Path, *, int8: bool = False) -> None:
        """Write weights, settings, tokenizer and a model card to a folder, whole or not at all."""
        weights = self.model.state_dict()
        save_checkpoint(Path(path), Checkpoint(self.config, weights, self.tokenizer, self.facts), int8=int8)

    def push_to_hub(self, repo: str, *, private: bool = True, int8: bool = False) -> str:
        """Upload the folder that `save_pretrained` writes; return its address."""
        import tempfile

        try:
            from huggingface_hub import HfApi
        except ImportError as error:
            raise UnembedError("uploading needs the hub's client: pip install 'unembed[hub]'.") from error
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(Path(folder) / "model", int8=int8)
            api = HfApi()
            api.create_repo(repo, private=private, exist_ok=True)
            return str(api.upload_folder(repo_id=repo, folder_path=Path(folder) / "model"))

    def check_vectors(self, vectors: Vectors) -> Tensor:
        """Bring vectors into shape (N, E) on the device, or say what is wrong with them."""
        e = check_vectors(vectors, size=self.size, encoder_name=self.encoder_name)
        return e.to(self.device)

    def _drafts(self, e: Tensor, first: int, options: FittedOptions, seed: int) -> Iterator[Draft]:
        """Run the loop for a batch whose first row has number `first`."""
        uniforms = options.draw(first, first + len(e), config=self.config.model, seed=seed).to(self.device)
        return decode(self.ready, e, options=options, diffusion=self.config.diffusion, uniforms=uniforms)

    @property
    def ready(self) -> Model:
        """The model as decoding runs it, made at first use; `model` keeps the weights as they are saved."""
        if self._ready is None:
            self._ready = prepare(self.model, self.numbers)
        return self._ready

    def _finish(self, e: Tensor, first: int, options: FittedOptions, seed: int) -> list[Inversion]:
        """Decode a batch to its end; on a CPU some texts beside others, which changes none of them."""
        workers = crew_size() if self.device.type == "cpu" else 1
        parts = share(len(e), each=options.rows, workers=workers) if workers > 1 else [slice(0, len(e))]
        drafts = finish([self._drafts(e[part], first + part.start, options, seed) for part in parts])
        read = partial(
            read_draft, strategy=options.strategy, tokenizer=self.tokenizer, config=self.config.model
        )
        return [found for draft in drafts for found in read(draft)]

    def _refine(
        self, e: Tensor, first: int, searcher: Searcher, advance: Callable[[int], None]
    ) -> list[Inversion]:
        """Search for the texts of a batch to the end."""
        unused = searcher.options.rounds + 1
        for standing in searcher.run(e, first=first):
            last = standing
            advance(1)
            unused -= 1
        advance(unused)
        return read_standing(
            last,
            strategy=searcher.decoding.strategy,
            ranked_by=searcher.reader.encoder.name,
            known=searcher.options.refine == "encoder",
            tokenizer=self.tokenizer,
            config=self.config.model,
        )


def _options(
    strategy: str, steps: int | None, temperature: float | None, guidance: float, knobs: dict[str, Any]
) -> DecodeOptions:
    """Gather decoding options, refusing knobs that do not exist."""
    known = ("remask", "restart", "reveal", "beams", "looks", "drafts")
    if unknown := knobs.keys() - set(known):
        raise UnembedError(f"unknown option {unknown.pop()!r}; known: {', '.join(known)}.")
    return DecodeOptions(strategy, steps, temperature, guidance, **knobs)


def _fresh_seed() -> int:
    """Draw a seed that no one has asked for."""
    return int(np.random.SeedSequence().generate_state(1, np.uint64)[0] >> 1)
