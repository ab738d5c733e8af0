"""`encode` and `prepare`: from text to vectors, and to data for training."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from unembed.cli.options import (
    BatchSize,
    Device,
    Field,
    Trust,
    at_least_one,
    open_encoder,
    writable_file,
    writable_folder,
)
from unembed.cli.terminal import FLAG, STDIN, Json, Stopped, at_terminal, dashed, say, write, write_json
from unembed.errors import UnembedError
from unembed.whole import whole_file

if TYPE_CHECKING:
    from unembed.tokens import TextTokenizer

ENCODER = "all-MiniLM-L6-v2"
Encoder = Annotated[
    str, Parameter(help="One of `unembed encoders`, a folder, a hub id, or http(s)://host/v1#model.")
]


def encode(
    file: Annotated[
        str, Parameter(help=".txt (a text a line), .jsonl or .parquet; - for lines of standard input.")
    ],
    /,
    *,
    encoder: Encoder = ENCODER,
    output: Annotated[
        Path | None,
        Parameter(
            name=["--output", "-o"],
            help="Where to write the vectors (.npy), whole or not at all.",
            validator=writable_file,
        ),
    ] = None,
    field: Field = "text",
    limit: Annotated[
        int | None, Parameter(help="Take the first so many texts.", validator=at_least_one)
    ] = None,
    batch_size: BatchSize = 64,
    device: Device = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Embed a file of texts."""
    import numpy as np

    from unembed.sources import read_texts

    output = None if str(output) == STDIN else output
    if output is not None and output.suffix != ".npy":
        raise UnembedError(f"vectors are written as .npy, not {output.name!r}; choose such a name.")
    blank: list[str] = []
    read = read_texts(dashed(file), field=field, on_blank=blank.append)
    texts = list(itertools.islice(read, limit))
    model = open_encoder(encoder, device=device, trust=trust_remote_code)
    vectors = model.encode(texts, batch_size=batch_size, show_progress_bar=at_terminal())
    if blank:
        all_ = len(blank) + len(texts)
        say(f"note: {len(blank)} of {all_} texts are blank and were left out; rows are numbered without them")
    if output is None:
        rows = [[round(float(x), 8) for x in row] for row in vectors]
        if json:
            write_json(rows)
        else:
            for row in rows:
                write(str(row))
        return
    with whole_file(output) as out:
        np.save(out, vectors, allow_pickle=False)
    if json:
        write_json(
            {"path": str(output), "encoder": model.name, "texts": len(texts), "embedding_size": model.size}
        )
    else:
        say(f"wrote {len(texts)} vectors of {model.size} numbers to {output}")


def prepare(
    *files: Annotated[
        str,
        Parameter(help=".txt (a text a line), .jsonl or .parquet, .gz and .xz too; - for standard input."),
    ],
    dataset: Annotated[
        str | None, Parameter(help="Stream c4, or mc4:en,zh,... instead of reading files.")
    ] = None,
    encoder: Encoder = ENCODER,
    output: Annotated[
        Path, Parameter(name=["--output", "-o"], help="The folder to fill.", validator=writable_folder)
    ],
    tokens: Annotated[int, Parameter(help="Longest text; longer ones are cut, and embedded as cut.")] = 32,
    min_tokens: Annotated[int, Parameter(help="Leave shorter texts out.")] = 1,
    passages: Annotated[
        bool,
        FLAG,
        Parameter(help="Keep passages whole and without vectors, to embed random spans while training."),
    ] = False,
    tokenizer: Annotated[
        str | None,
        Parameter(help="Another vocabulary than the encoder's: a tokenizer.json, its folder or a hub id."),
    ] = None,
    field: Field = "text",
    limit: Annotated[int | None, Parameter(help="Take so many texts at most.")] = None,
    shard_size: Annotated[
        int, Parameter(help="Texts a shard: what is lost at most when a run is killed.")
    ] = 65_536,
    batch_size: BatchSize = 256,
    device: Device = None,
    trust_remote_code: Trust = False,
    json: Json = False,
) -> None:
    """Turn text into data for training: shards of ids and vectors."""
    from unembed.corpus import prepare
    from unembed.sources import read_texts, stream_dataset

    if bool(files) == bool(dataset):
        raise UnembedError("give either files to read or --dataset to stream, and not both.")
    names = [dataset] if dataset else [dashed(name) for name in files]
    texts = stream_dataset(dataset) if dataset else read_texts(names, field=field)
    # An empty source is to be refused before the encoder is loaded and the folder made.
    texts = itertools.chain(list(itertools.islice(texts, 1)), texts)
    model = open_encoder(encoder, device=device, trust=trust_remote_code)
    try:
        data = prepare(
            texts,
            encoder=model,
            tokenizer=_open_tokenizer(tokenizer) if tokenizer else None,
            out=output,
            max_tokens=tokens,
            min_tokens=min_tokens,
            kind="passages" if passages else "pairs",
            limit=limit,
            shard_size=shard_size,
            batch_size=batch_size,
            source_names=names,
            show_progress=at_terminal(),
        )
    except KeyboardInterrupt as error:
        raise Stopped("stopped; run the same command again to go on.") from error
    truncated = int(data.manifest["truncated"])
    if json:
        write_json(
            {
                "path": str(output),
                "kind": data.kind,
                "encoder": data.encoder_name,
                "embedding_size": data.embedding_size,
                "max_tokens": data.max_tokens,
                "texts": data.count,
                "truncated": truncated,
                "shards": len(data.manifest["shards"]),
            }
        )
        return
    cut = f", {truncated} of them cut to {tokens} tokens" if truncated else ""
    write(f"{output}: {data.count} {data.kind} for {data.encoder_name}{cut}")


def _open_tokenizer(name: str) -> TextTokenizer:
    """Load a vocabulary from a file, a folder or the hub."""
    import tokenizers

    from unembed.tokens import TextTokenizer

    path = Path(name)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        if path.is_file():
            base = tokenizers.Tokenizer.from_file(str(path))
        else:
            base = tokenizers.Tokenizer.from_pretrained(name)
    except Exception as error:  # tokenizers raises bare Exception
        raise UnembedError(
            f"tokenizer {name} is neither a tokenizer.json here nor on the hub "
            f"({' '.join(str(error).split())[:120]}); check the path."
        ) from error
    return TextTokenizer.wrap(base, name=name)
