"""Files and folders that are written whole or not at all, whatever goes wrong on the way.

Knows paths and bytes; nothing of what is in them.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from unembed.errors import UnembedError


def write_whole(path: Path, text: str) -> None:
    """Write a text whole or not at all."""
    with whole_file(path) as out:
        out.write(text.encode())


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Give a file that takes the place of `path` when all of it is written, and only then.

    A link stays a link. Nothing takes the place of a pipe, a device or standard output: they are
    written into, likewise when all is there.
    """
    if (stream := _open_stream(path)) is not None:
        with stream, io.BytesIO() as whole:
            yield whole
            stream.write(whole.getvalue())
        return
    draft: Path | None = None
    target = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
        draft = Path(name)
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.chmod(0o666 & ~_umask())
        os.replace(draft, target)
    except BaseException as error:
        if draft is not None:
            draft.unlink(missing_ok=True)
        if isinstance(error, OSError):
            reason = (
                "the disk is full" if error.errno == errno.ENOSPC else str(error.strerror or error).lower()
            )
            raise UnembedError(f"could not write {path}: {reason}; nothing was written.") from error
        raise


def _open_stream(path: Path) -> IO[bytes] | None:
    """Open what is there and can only be written into; None where a file can be put."""
    try:
        there = path.stat()
    except OSError:  # nothing yet, or nothing that can be had
        return None
    with suppress(OSError):  # standard output may be closed
        if os.path.samestat(there, os.fstat(1)):
            return os.fdopen(os.dup(1), "wb")
    # Of a folder the attempt to replace it complains.
    return None if stat.S_ISREG(there.st_mode) or stat.S_ISDIR(there.st_mode) else path.open("wb")


def _umask() -> int:
    """The mask of new files' permissions, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Give a temporary folder that takes the place of `target` when all went well, and only then."""
    target = Path(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise _disk_error(target, error) from error
    try:
        yield draft
        draft.chmod(0o755)
        _replace(draft, target)
    except BaseException as error:
        from safetensors import SafetensorError  # not sooner: all commands load this module

        shutil.rmtree(draft, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise _disk_error(target, error) from error
        raise


def _replace(draft: Path, target: Path) -> None:
    """Move a folder to where another may stand; if that fails, the other stands there as before."""
    if not target.exists():
        os.replace(draft, target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
    old = aside / target.name
    try:
        os.replace(target, old)
        os.replace(draft, target)
    except BaseException:
        if not target.exists():
            os.replace(old, target)
        raise
    finally:
        # Nothing is deleted unless something stands at the target.
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)


def mend_folder(target: Path) -> None:
    """Clear up after a kill inside `whole_folder`: put the old folder back if none stands, drop drafts."""
    for aside in target.parent.glob(f".{target.name}-old-*"):
        if not target.exists() and (aside / target.name).exists():
            os.replace(aside / target.name, target)
    for rest in target.parent.glob(f".{target.name}-*"):
        shutil.rmtree(rest, ignore_errors=True)


def _disk_error(target: Path, error: Exception) -> UnembedError:
    """Say why nothing could be written."""
    full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
    reason = "the disk is full" if full else str(error)
    return UnembedError(f"could not write {target}: {reason}; what was there before is unchanged.")
