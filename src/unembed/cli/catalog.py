"""`presets`, `strategies`, `encoders`, `models`: what there is."""

from __future__ import annotations

from typing import Any, get_args

from unembed.cli.terminal import Json, say, show_table, write_json


def presets(*, json: Json = False) -> None:
    """List the presets, with their parameters for each way to freeze them."""
    import dataclasses

    from unembed.backbone import count
    from unembed.config import PRESETS, Freeze

    rows: list[dict[str, Any]] = []
    for name, config in PRESETS.items():
        for freeze in get_args(Freeze):
            if freeze == "backbone" and not config.model.backbone:
                continue
            counts = count(dataclasses.replace(config.model, freeze=freeze))
            rows.append(
                {
                    "name": name,
                    "freeze": freeze,
                    "encoder": config.encoder,
                    "layers": config.model.layers,
                    "hidden_size": config.model.hidden,
                    "vocabulary": config.model.vocab_size,
                    "total_parameters": counts.total,
                    "trainable_parameters": counts.trainable,
                }
            )
    if json:
        write_json(rows)
        return
    heads = ["preset", "freeze", "layers", "hidden", "vocabulary", "total", "trainable"]
    cells = []
    for i, row in enumerate(rows):
        again = i > 0 and rows[i - 1]["name"] == row["name"]
        shape = ["", "", ""] if again else [row["layers"], row["hidden_size"], f"{row['vocabulary']:,}"]
        sizes = [f"{row[key] / 1e6:.1f}M" for key in ("total_parameters", "trainable_parameters")]
        cells.append(["" if again else row["name"], row["freeze"], *shape, *sizes])
    show_table(heads, cells, numbers=heads[2:])


def strategies(*, json: Json = False) -> None:
    """List the decoding strategies."""
    from unembed.strategies import STRATEGIES

    rows = [{"name": s.name, "summary": s.summary, "temperature": s.temperature} for s in STRATEGIES.values()]
    if json:
        write_json(rows)
        return
    heads = ["strategy", "what a step does", "temperature"]
    show_table(heads, [list(row.values()) for row in rows], numbers=heads[2:], wrap=heads[1])
    say(
        "note: auto, the default, is beam if the model reads left to right, confidence if not or with --steps"
    )


def encoders(*, json: Json = False) -> None:
    """List the encoders known by name; any other goes by folder, hub id or http address."""
    from unembed.encoders import ENCODERS

    rows = [
        {"name": name, "embedding_size": spec.size, "source": spec.source, "notes": spec.notes}
        for name, spec in ENCODERS.items()
    ]
    if json:
        write_json(rows)
        return
    heads = ["encoder", "size", "source and notes"]
    cells = [[row["name"], row["embedding_size"], f"{row['source']}\n{row['notes']}"] for row in rows]
    show_table(heads, cells, numbers=["size"], wrap=heads[2])


def models(*, json: Json = False) -> None:
    """List the models that come with the package."""
    rows = bundled()
    if json:
        write_json(rows)
    elif not rows:
        say("no model comes with this version; train one and give its folder with --model.")
    else:
        heads = ["model", "encoder", "layers", "hidden", "tokens", "megabytes"]
        show_table(heads, [list(row.values()) for row in rows], numbers=heads[2:])


def bundled() -> list[dict[str, Any]]:
    """Describe the bundled models."""
    from unembed.checkpoint import CONFIG, bundled_models
    from unembed.config import Config

    rows = []
    for name, folder in bundled_models().items():
        config = Config.from_json((folder / CONFIG).read_text(encoding="utf-8"))
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        rows.append(
            {
                "name": name,
                "encoder": config.encoder,
                "layers": config.model.layers,
                "hidden_size": config.model.hidden,
                "max_tokens": config.model.max_tokens,
                "megabytes": round(size / 1e6, 1),
            }
        )
    return rows
