"""`python -m unembed.demo`: recover sentences from their vectors alone, with no network.

With a bundled model for all-MiniLM-L6-v2 it takes that one; without, it trains a tiny one first, for
a minute or two, and says so.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from unembed.encoders import Encoder
    from unembed.inverter import Inverter

ENCODER = "all-MiniLM-L6-v2"
# Written for the demo, and in no training set.
SENTENCES = (
    "The train to Lyon leaves at seven from platform four.",
    "Please send the signed contract to our lawyer by Friday.",
    "She was diagnosed with asthma when she was nine years old.",
    "Our quarterly revenue fell by twelve percent.",
    "My password hint is the name of my first dog.",
    "Could you water the plants while we are in Spain?",
)
TOKENS = 24  # the longest sentence of demo.txt has no more, and padding costs time
STEPS = 300  # enough to learn the 300 sentences by heart
MINUTES = 5.0  # at most, on a slow or busy machine; the rate of learning falls to its end by then
SHOWN = 6  # of the sentences a tiny model has learnt by heart


def main() -> None:
    """Run the demo."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # before anything that reads it is imported
    from rich.console import Console

    from unembed.checkpoint import bundled_models
    from unembed.encoders import load_encoder
    from unembed.inverter import Inverter

    out = Console(highlight=False)
    warnings.showwarning = lambda message, *_, **__: out.print(f"note: {message}")
    encoder = load_encoder(ENCODER)
    if ENCODER in bundled_models():
        out.print(f"\nThe bundled model inverts vectors of [bold]{ENCODER}[/].")
        _compare(list(SENTENCES), inverter=Inverter.from_pretrained(ENCODER), encoder=encoder, out=out)
        return
    with tempfile.TemporaryDirectory() as folder:
        inverter = _train(Path(folder), encoder=encoder, out=out)
        texts = _learnt()
        chosen = texts[:: len(texts) // SHOWN][:SHOWN]
        _compare(chosen, inverter=inverter, encoder=encoder, out=out)
    out.print(
        "It had seen these very sentences in training: this shows that the machinery works, not how "
        "much it recovers of text it has never seen.\n"
    )


def _learnt() -> list[str]:
    """The sentences that come with the package for this purpose."""
    return (resources.files("unembed") / "data" / "demo.txt").read_text(encoding="utf-8").splitlines()


def _train(folder: Path, *, encoder: Encoder, out: Console) -> Inverter:
    """Prepare the sentences, train the preset `tiny` on them, and load what came of it."""
    from unembed.config import preset
    from unembed.corpus import prepare
    from unembed.inverter import Inverter
    from unembed.train import train

    texts = _learnt()
    out.print(
        f"\nNo trained model is bundled with this version. Training the preset [bold]tiny[/] on "
        f"{len(texts)} sentences, to learn them by heart; a minute or two on two cores …"
    )
    prepare(texts, encoder=encoder, out=folder / "data", max_tokens=TOKENS, source_names=["demo.txt"])
    config = preset("tiny").override(steps=STEPS, minutes=MINUTES)
    result = train(config, data=folder / "data", out=folder / "run", show_progress=out.is_terminal)
    if result.interrupted:
        raise KeyboardInterrupt
    out.print(f"Trained {result.steps} steps in {result.seconds:.0f} s.")
    return Inverter.from_pretrained(result.model)


def _compare(texts: list[str], *, inverter: Inverter, encoder: Encoder, out: Console) -> None:
    """Embed texts, forget them, recover them, and show both."""
    from unembed.cli.shades import comparison

    out.print(
        f"Embedding {len(texts)} sentences, forgetting them, and recovering them from {encoder.size} "
        "numbers each:\n"
    )
    found = inverter.reconstruct(texts, encoder=encoder, seed=0)
    out.print(comparison(found, tokenizer=inverter.tokenizer))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
