"""One stretch of a long training: train for some minutes, save in int8, measure on held-out text.

    python recipes/stretch.py OUT --data DIR --texts DIR --minutes 16 [--start-from MODEL] [field=value ...]

With `--limit 0` nothing is decoded: what is averaged with earlier weights need not be measured alone.
Needs no command line of unembed, so it runs where only torch and transformers are. The next stretch starts
from the weights of this one, by a short warm-up, since the state of the optimiser is left behind.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import compare

from unembed.corpus import PreparedData
from unembed.inverter import Inverter
from unembed.train import train


def measure_both(out: Path, unquantised: Path, *, data: PreparedData, args: Namespace) -> dict[str, Any]:
    """Figures of what was saved in int8, and those that tell what quantising cost."""
    measured = {}
    for name, folder in (("sets", out / "int8"), ("unquantised", unquantised)):
        inverter = Inverter.from_pretrained(folder)
        modes = compare.plain_modes(inverter)
        if name == "unquantised":  # two modes are enough
            modes = {mode: modes[mode] for mode in ("c8", "beam") if mode in modes}
        measured[name] = compare.measure_sets(
            args.texts, modes, limit=args.limit, data=data, encoder=inverter.encoder()
        )
    return measured


def main() -> None:
    """Train, save, measure; what is saved is what is measured."""
    parser = compare.arguments(__doc__)
    parser.add_argument("--start-from", help="weights of the stretch before: a folder or a bundled name")
    args = parser.parse_intermixed_args()
    config, data, fields = compare.settings(args)
    out = Path(args.name)
    with compare.turn(args.lock):
        result = train(config, data=args.data, out=out / "run", start_from=args.start_from)
        Inverter.from_pretrained(result.model).save_pretrained(out / "int8", int8=True)
        (out / "saved").touch()
        measured = measure_both(out, result.model, data=data, args=args) if args.limit else {}
    summary = {
        "fields": fields,
        "start_from": args.start_from,
        "steps": result.steps,
        "passages": result.steps * config.train.batch_size,
        "seconds": round(result.seconds, 1),
        "validation_loss": result.validation_loss,
        **measured,
    }
    (out / "figures.json").write_text(json.dumps(summary, indent=1))
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
