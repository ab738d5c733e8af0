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


def hindrance(path: Path, *, folder: bool = False) -> str:
    """Why no file, or no folder, can be written there, as far as is known before the work; else empty."""
    if os.path.exists(path):  # unlike `Path.exists`, False for what may not be looked at
        if path.is_dir() != folder:
            return "it is no folder" if folder else "it is a folder"
        if folder or not path.is_file():  # perhaps nothing is left to do there; or it is a pipe or a device
            return ""
        if not os.access(path, os.W_OK):
            return "permission denied"
    there = next(each for each in Path(os.path.realpath(path)).parents if os.path.exists(each))
    if not there.is_dir():
        return f"{there.name} is no folder"
    return "" if os.access(there, os.W_OK | os.X_OK) else "permission denied"


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
        _open_to_others(draft)
        _replace(draft, target)
    except BaseException as error:
        from safetensors import SafetensorError  # not sooner: all commands load this module

        shutil.rmtree(draft, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise _disk_error(target, error) from error
        raise


def _open_to_others(draft: Path) -> None:
    """Give a folder and its files the usual permissions; who made them let nobody else in."""
    mask = _umask()
    for path in (draft, *draft.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


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
    if (standing := standing_folder(target)) != target:
        os.replace(standing, target)
    for rest in target.parent.glob(f".{target.name}-*"):
        shutil.rmtree(rest, ignore_errors=True)


def standing_folder(target: Path) -> Path:
    """Where a folder lies: in its place, or aside, if a kill inside `whole_folder` has left it there."""
    aside = (each / target.name for each in target.parent.glob(f".{target.name}-old-*"))
    return next((each for each in (target, *aside) if each.exists()), target)


def _disk_error(target: Path, error: Exception) -> UnembedError:
    """Say why nothing could be written."""
    full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
    reason = "the disk is full" if full else str(error)
    return UnembedError(f"could not write {target}: {reason}; what was there before is unchanged.")
