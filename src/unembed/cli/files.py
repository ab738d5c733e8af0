"""Files of vectors, and files written whole or not at all.

Knows formats, not what the vectors are for. A pickle is never loaded.
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from unembed.cli.terminal import STDIN, invite
from unembed.errors import UnembedError, unknown_name

if TYPE_CHECKING:
    import numpy as np

ENDINGS = (".npy", ".npz", ".parquet", ".jsonl")
COLUMNS = ("vector", "embedding", "vectors", "embeddings")
_SIGNS = {".npy": b"\x93NUMPY", ".npz": b"PK", ".parquet": b"PAR1"}  # what such files begin with
_PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt")


def read_vectors(name: str, *, key: str | None = None, column: str | None = None) -> np.ndarray:
    """Read an array (N, E) of vectors from a file, or from standard input, whose format is found out.

    Args:
        name: .npy, .npz, .parquet or .jsonl, or what stands for standard input.
        key: Array of an .npz; its only one, or only table of floats, by default.
        column: Column of a .parquet, field of a .jsonl; the usual names by default.
    """
    import numpy as np

    source, shown, ending = _open(name)
    _check_choice(ending, key=key, column=column)
    try:
        if ending == ".npy":
            vectors = np.load(source, allow_pickle=False)
        elif ending == ".npz":
            vectors = _from_npz(source, shown, key)
        elif ending == ".parquet":
            vectors = _from_parquet(source, shown, column)
        else:
            vectors = _from_jsonl(source, shown, column)
    except UnembedError:
        raise
    except (ValueError, EOFError, OSError) as error:
        reason = "it holds pickled objects" if "allow_pickle" in str(error) else str(error)
        raise UnembedError(f"{shown} cannot be read as {ending} ({reason}); check the file.") from error
    if vectors.dtype.kind not in "fiu":
        raise UnembedError(f"{shown} holds {vectors.dtype}, not numbers; expected rows of numbers.")
    if not vectors.ndim:
        raise UnembedError(f"{shown} holds a single number; expected rows of numbers.")
    if not vectors.size:
        raise UnembedError(f"{shown} holds no vectors; expected at least one.")
    return vectors[None] if vectors.ndim == 1 else vectors


def _open(name: str) -> tuple[IO[bytes], str, str]:
    """Open a source in memory: its bytes, how to call it, its format."""
    if name == STDIN:
        invite("vectors")
        raw = sys.stdin.buffer.read()
        if not raw.strip():
            raise UnembedError("standard input is empty; expected vectors as JSON lines or .npy.")
        ending = next((kind for kind, sign in _SIGNS.items() if raw.startswith(sign)), ".jsonl")
        return io.BytesIO(raw), "standard input", ending
    path, ending = Path(name), Path(name).suffix.lower()
    if not path.exists():
        raise UnembedError(f"there is no file {name}; check the path.")
    if ending in _PICKLES:
        raise UnembedError(f"{name} is a pickle, which unembed never loads; save the vectors as .npy.")
    if not path.is_file() or ending not in ENDINGS:
        raise UnembedError(f"cannot read {name}; expected a file ending in {', '.join(ENDINGS)}.")
    if not path.stat().st_size:
        raise UnembedError(f"{name} is empty; expected vectors.")
    file = path.open("rb")
    if not file.read(8).startswith(_SIGNS.get(ending, b"")):
        raise UnembedError(f"{name} is no {ending} file, whatever its name says; check the file.")
    file.seek(0)
    return file, name, ending


def _check_choice(ending: str, *, key: str | None, column: str | None) -> None:
    """Refuse to choose a part by what such files do not have."""
    for option, value, kinds in (("key", key, (".npz",)), ("column", column, (".parquet", ".jsonl"))):
        if value is not None and ending not in kinds:
            raise UnembedError(f"--{option} is for {' and '.join(kinds)}, not {ending}; leave it out.")


def _from_npz(source: IO[bytes], shown: str, key: str | None) -> np.ndarray:
    """Read one array of an archive."""
    import zipfile
    import zlib

    import numpy as np

    try:
        with np.load(source, allow_pickle=False) as archive:
            if not archive.files:
                raise UnembedError(f"{shown} holds no array; expected one of vectors.")
            if key is not None and key not in archive.files:
                raise unknown_name(f"array of {shown}", key, archive.files)
            return np.asarray(_only_table(archive, shown) if key is None else archive[key])
    except (zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(str(error)) from error


def _only_table(archive: Any, shown: str) -> np.ndarray:
    """Read the one array of an archive that can be vectors: the only one there is, or the only 2-D floats."""
    import numpy as np

    if len(archive.files) == 1:
        return archive[archive.files[0]]
    tables = []
    for name in archive.files:
        with suppress(ValueError):  # pickled objects, such as ids may be, are no vectors
            array = np.asarray(archive[name])  # whatever else is in the archive is bytes
            if array.ndim == 2 and array.dtype.kind == "f":
                tables.append(array)
    if len(tables) != 1:
        raise UnembedError(
            f"{shown} holds several arrays ({', '.join(archive.files)}), and which of them holds vectors "
            "cannot be told; name it with --key."
        )
    return tables[0]


def _from_parquet(source: IO[bytes], shown: str, column: str | None) -> np.ndarray:
    """Read a column of lists."""
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(source)
        names = file.schema_arrow.names
        lists = [f.name for f in file.schema_arrow if isinstance(f.type, _list_types(pyarrow))]
        wanted = column or next((c for c in COLUMNS if c in lists), lists[0] if lists else None)
        if wanted is None:
            raise UnembedError(f"{shown} has no column of lists; it has {', '.join(names)}.")
        if wanted not in names:
            raise unknown_name(f"column of {shown}", wanted, names)
        rows = file.read(columns=[wanted]).column(0).to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from error
    return _even(dict(enumerate(rows, 1)), shown, "row")


def _list_types(pyarrow: Any) -> tuple[type, ...]:
    """The three ways in which Arrow spells a list."""
    return pyarrow.ListType, pyarrow.LargeListType, pyarrow.FixedSizeListType


def _from_jsonl(source: IO[bytes], shown: str, column: str | None) -> np.ndarray:
    """Read a list a line, or a field of an object a line."""
    rows: dict[int, Any] = {}
    for number, line in enumerate(source, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_int=float)  # which makes infinity of what no float can hold
        except (ValueError, RecursionError) as error:
            raise UnembedError(f"{shown}, line {number} is not JSON; expected a list of numbers.") from error
        if isinstance(row, dict):
            found = [column] if column else [c for c in COLUMNS if c in row]
            if not found or found[0] not in row:
                asked = f"no field {column!r}" if column else f"none of the fields {', '.join(COLUMNS)}"
                raise UnembedError(f"{shown}, line {number} has {asked}; name one of its own with --column.")
            row = row[found[0]]
        elif column is not None:
            raise UnembedError(f"{shown}, line {number} has no fields to choose from; leave --column out.")
        rows[number] = row
    return _even(rows, shown, "line")


def _even(rows: dict[int, Any], shown: str, unit: str) -> np.ndarray:
    """Make an array of numbered rows, naming the first that does not fit."""
    import numpy as np

    first = next(iter(rows), 0)
    for number, row in rows.items():
        if not isinstance(row, list) or not all(isinstance(x, int | float) for x in row):
            raise UnembedError(f"{shown}, {unit} {number} is not a list of numbers; leave it out.")
        if len(row) != len(rows[first]):
            raise UnembedError(
                f"{shown}, {unit} {number} has {len(row)} numbers, but {unit} {first} has "
                f"{len(rows[first])}; vectors of one encoder have one size."
            )
    return np.array(list(rows.values()), dtype=np.float64)
