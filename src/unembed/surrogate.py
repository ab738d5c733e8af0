"""A small network in the place of an encoder: ids in, its guess of the encoder's vector out.

Holds the network, and `DistilledEncoder`, which is asked as an encoder is, with its folder and card.
It has seen the encoder's vectors and nothing else of it. Must not know how it was trained, nor what
its vectors are for. Letters as in `model.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unembed.checkpoint import (
    CARD,
    FACTS,
    bundled_folder,
    figures_table,
    load_into,
    quantise,
    read_weights,
    write_weights,
)
from unembed.config import Config, ModelConfig
from unembed.errors import UnembedError
from unembed.model import Attention, place_turns
from unembed.tokens import TextTokenizer
from unembed.whole import whole_folder

# Not config.json, so that no one takes a distilled encoder for an inverter.
CONFIG = "encoder.json"


class Block(nn.Module):
    """Attention and feed-forward, each behind a layer norm."""

    def __init__(self, config: ModelConfig) -> None:
        """Build both sub-layers."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.hidden), nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.up = nn.Linear(config.hidden, config.ffn)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor, turns: Tensor, outside: Tensor) -> Tensor:
        """Update the residual stream x (B, T, D), of which no place sees what is outside its text."""
        x = x + self.attention(self.norm1(x), turns, outside)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Surrogate(nn.Module):
    """Token embeddings, a few layers, the mean over the text, a projection to the vector's size."""

    turns: Tensor

    def __init__(self, config: ModelConfig) -> None:
        """Build the network with fresh weights.

        Of the settings it takes the sizes and the padding; what concerns diffusion means nothing here.
        The token table is half as wide as the network: it is the largest part, and tokens need less
        room than texts.
        """
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.hidden // 2)
        self.widen = nn.Linear(config.hidden // 2, config.hidden, bias=False)
        self.places = nn.Parameter(torch.empty(config.max_tokens, config.hidden))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.project = nn.Linear(config.hidden, config.embedding_size)
        turns = place_turns(config.max_tokens, config.hidden // config.heads, device="cpu")
        self.register_buffer("turns", turns, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Draw the weights; what writes into the residual stream is small, so that depth begins gently."""
        for name, p in self.named_parameters():
            if p.dim() < 2:
                continue
            std = p.shape[1] ** -0.5
            if name.endswith(("out.weight", "down.weight")):
                std *= (2 * self.config.layers) ** -0.5
            nn.init.normal_(p, std=0.02 if name == "places" else std)
        nn.init.normal_(self.tokens.weight, std=1.0)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Guess the unit vectors (B, E) of texts: rows of ids (B, T), `lengths` (B,) of them content."""
        inside = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        T = ids.shape[1]
        x = self.widen(self.tokens(ids)) + self.places[:T]
        for block in self.blocks:
            x = block(x, self.turns[:, :T], ~inside[:, None, None])
        # The mean is taken before the norm, so that a token can weigh more than another.
        mean = (x * inside[..., None]).sum(1) / lengths[:, None]
        return F.normalize(self.project(self.norm(mean)).float(), dim=-1)


class DistilledEncoder:
    """A surrogate that is asked as the encoder is, whose vectors it has learnt."""

    def __init__(
        self,
        model: Surrogate,
        *,
        config: Config,
        tokenizer: TextTokenizer,
        facts: dict[str, Any] | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        """Wrap a network; most people want `from_pretrained`."""
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model = model.to(self.device).eval()
        self.config, self.tokenizer, self.facts = config, tokenizer, dict(facts or {})

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | Path, device: str | torch.device | None = None
    ) -> DistilledEncoder:
        """Load the one bundled for an encoder, by the encoder's name, or a folder."""
        folder = find_distilled(name_or_path)
        try:
            config = Config.from_json((folder / CONFIG).read_text(encoding="utf-8"))
            facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UnembedError(f"{folder} was not written by unembed train-encoder ({error}).") from error
        with torch.device("meta"):
            model = Surrogate(config.model)
        load_into(model, read_weights(folder), source=str(folder))
        return cls(model, config=config, tokenizer=TextTokenizer.load(folder), facts=facts, device=device)

    @property
    def target(self) -> str:
        """Name of the encoder whose vectors these are guesses of."""
        return self.config.encoder

    @property
    def name(self) -> str:
        """What to call it, so that no one takes its vectors for the encoder's."""
        return f"distilled {self.target}"

    @property
    def size(self) -> int:
        """Numbers in a vector."""
        return self.config.model.embedding_size

    @property
    def max_tokens(self) -> int:
        """Longest text it reads, in tokens."""
        return self.config.model.max_tokens

    def encode(
        self, texts: Sequence[str], *, batch_size: int = 64, show_progress_bar: bool = False
    ) -> np.ndarray:
        """Embed texts, one float32 row each; of a text that is too long, its beginning.

        Made for as many texts as a search has, it shows no bar.
        """
        encoded = self.tokenizer.encode(texts, max_tokens=self.max_tokens)
        ids, lengths = torch.from_numpy(encoded.ids), torch.from_numpy(encoded.lengths)
        out = np.empty((len(ids), self.size), np.float32)
        # By length, so that short texts are not padded to the longest of all.
        for rows in lengths.argsort(stable=True).split(batch_size):
            if len(rows):
                width = int(lengths[rows].max())
                some = self.encode_ids(ids[rows, :width].to(self.device), lengths[rows].to(self.device))
                out[rows.numpy()] = some.cpu().numpy()
        return out

    def encode_ids(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Embed rows of content ids (B, T), `lengths` (B,) of them in each, on this encoder's device."""
        with torch.inference_mode(), self._half():
            vectors = self.model(ids, lengths)
        return vectors.clone()  # made outside, because an inference tensor cannot enter a training graph

    def _half(self) -> AbstractContextManager[Any]:
        """On GPUs, matrix products in float16, whose rounding is far below this encoder's own error."""
        return torch.autocast("cuda", torch.float16) if self.device.type == "cuda" else nullcontext()

    def save_pretrained(self, path: str | Path, *, int8: bool = True) -> None:
        """Write weights, settings, tokenizer and a card to a folder, whole or not at all."""
        folder = Path(path)
        foreign = folder.is_dir() and any(folder.iterdir()) and not (folder / CONFIG).is_file()
        if folder.is_file() or foreign:
            raise UnembedError(
                f"{folder} exists and is not a distilled encoder; choose a new or empty folder."
            )
        weights = self.model.state_dict()
        with whole_folder(folder) as draft:
            (draft / CONFIG).write_text(self.config.to_json(), encoding="utf-8")
            (draft / FACTS).write_text(json.dumps(self.facts, indent=2) + "\n", encoding="utf-8")
            (draft / CARD).write_text(self.card(int8=int8), encoding="utf-8")
            self.tokenizer.save(draft)
            write_weights(draft, quantise(weights) if int8 else weights)

    def card(self, *, int8: bool) -> str:
        """Write the card: what this is, what it has learnt from, how well it agrees, its limits."""
        m = self.config.model
        count = sum(p.numel() for p in self.model.parameters())
        lines = [
            "---", "license: apache-2.0", "library_name: unembed", "tags: [sentence-embeddings]", "---", "",
            f"# Distilled encoder for {self.target}", "",
            f"Guesses the vectors ({self.size} numbers) that `{self.target}` gives to texts of up to "
            f"{m.max_tokens} tokens. Learnt from texts and their vectors alone. In unembed it ranks the "
            "candidates of a search where the encoder itself is not at hand.", "",
            "```python", "from unembed import Inverter", "",
            "inverter = Inverter.from_pretrained()",
            'inverter.invert(vectors, refine="distilled", distilled="path/to/this/folder")', "```", "",
            "## Model", "",
            f"{count / 1e6:.1f}M parameters{', int8' if int8 else ''}; {m.layers} layers x {m.hidden}, the "
            "mean over the text, a projection.", "",
        ]  # fmt: skip
        facts = self.facts
        if facts.get("training"):
            lines += ["## Training", "", *(f"- {k}: {v}" for k, v in facts["training"].items()), ""]
        if facts.get("data"):
            lines += ["## Data", "", *(f"- {row}" for row in facts["data"]), ""]
        if facts.get("agreement"):
            lines += [
                "## Agreement with the encoder, on text kept out of training", "",
                *figures_table(facts["agreement"]), "",
                "`cosine`: mean, between its vector of a text and the encoder's. `rank correlation`: "
                "Spearman's, between its and the encoder's cosine to a text's true vector, over copies of "
                "the text with 1 to 6 tokens replaced, deleted, inserted or swapped; the mean over texts. "
                "`first`: share of texts that it ranks before all their copies.", "",
            ]  # fmt: skip
        lines += [
            "## Limits", "",
            f"A guess, not the encoder: its cosine cannot tell that a text is exactly the one behind a "
            f"vector, only that it is near. Text of up to {m.max_tokens} tokens of the kinds in its data; "
            "the rest of a longer text is not read. Not made for retrieval.", "",
            "## Intended use", "",
            "To show and to measure what stored embeddings give away when the encoder is out of reach, on "
            "data you own or may audit. Not to read other people's data.", "",
        ]  # fmt: skip
        return "\n".join(lines)


def find_distilled(name_or_path: str | Path) -> Path:
    """Turn an encoder's name into the folder of the distilled one bundled for it; a folder is itself."""
    folder = Path(name_or_path)
    if (folder / CONFIG).is_file():
        return folder
    bundled = bundled_folder() / f"{name_or_path}-encoder"
    if (bundled / CONFIG).is_file():
        return bundled
    if folder.exists():
        raise UnembedError(f"{folder} holds no distilled encoder: it has no {CONFIG}.")
    raise UnembedError(
        f"there is no distilled encoder for {name_or_path} at hand; train one with unembed train-encoder, "
        "and give its folder."
    )
