"""The mean of several models' weights: stretches of one training read better together than each alone.

    python recipes/average.py runs/mean runs/tenth=0.25 runs/eleventh=0.3 runs/twelfth=0.45

Shares must sum to one. Settings and facts are those of the last.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from unembed import Inverter


def shared(given: str) -> tuple[str, float]:
    """Read MODEL=SHARE."""
    model, _, share = given.rpartition("=")
    return model, float(share)


@torch.no_grad()
def average(parts: list[tuple[str, float]]) -> Inverter:
    """Load each model, and make the last one the mean of all, weighed by their shares."""
    total: dict[str, torch.Tensor] = {}
    for model, share in parts:
        last = Inverter.from_pretrained(model, device="cpu", precision="fp32")
        for name, weights in last.model.state_dict().items():
            kept = weights * share if weights.is_floating_point() else weights
            total[name] = total[name] + kept if name in total and weights.is_floating_point() else kept
    last.model.load_state_dict(total)
    return last


def main() -> None:
    """Average and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", type=shared, nargs="+", metavar="MODEL=SHARE")
    args = parser.parse_args()
    if abs(sum(share for _, share in args.parts) - 1) > 1e-6:
        parser.error("shares must sum to one")
    average(args.parts).save_pretrained(args.out)


if __name__ == "__main__":
    main()
