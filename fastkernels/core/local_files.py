"""Reads files of this machine: regular ones only, of a bounded size that is known before anything is read."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

MOST = 2 << 30  # bytes of a file that a Python call names
# A FIFO without a writer would block open().
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


class FileError(ValueError):
    """A file that is not read. The message continues a name, such as "image 0"."""


def opened(path: str | os.PathLike[str]) -> BinaryIO:
    """A regular file, open for reading. Raises FileError."""
    try:
        number = os.open(path, _FLAGS)
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise FileError(f"cannot be read: {os.fspath(path)!r}: {_words(error)}") from error
    return _regular(number, os.fspath(path))


def read(path: str | os.PathLike[str], most: int = MOST) -> bytes:
    """The bytes of a regular file. Raises FileError, before reading if it is larger than `most`."""
    return _read(opened(path), os.fspath(path), most)


def below(folder: Path, url: str, most: int) -> bytes:
    """The file behind a `file://` URL, which must be in `folder`. Raises FileError.

    A path with `..` or a symbolic link below the folder is refused: each of its parts is opened in the one before, so
    that a link that is made meanwhile leads nowhere.
    """
    parts = urlsplit(url)
    path = unquote(parts.path)
    try:
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise ValueError("it must be file:// and an absolute path")
        own = Path(path).relative_to(folder).parts
        if not own or ".." in own:
            raise ValueError("it names no file")
    except ValueError as error:
        raise FileError(
            f"cannot be read: {url[:200]!r} is not in the folder {str(folder)!r} that this server reads"
            " (--allowed-local-media-path)"
        ) from error
    flags = _FLAGS | getattr(os, "O_NOFOLLOW", 0)
    try:
        with ExitStack() as stack:
            at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, at)
            for part in own[:-1]:
                at = os.open(part, flags | os.O_DIRECTORY, dir_fd=at)
                stack.callback(os.close, at)
            number = os.open(own[-1], flags, dir_fd=at)
    except (OSError, ValueError) as error:
        raise FileError(f"cannot be read: {url[:200]!r}: {_words(error)}") from error
    return _read(_regular(number, path), path, most)


def _regular(number: int, path: str) -> BinaryIO:
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise FileError(f"cannot be read: {path!r} is not a regular file")
    return os.fdopen(number, "rb")


def _read(file: BinaryIO, path: str, most: int) -> bytes:
    with file:
        size = os.fstat(file.fileno()).st_size
        if size <= most:
            found = file.read(most + 1)  # it may grow
            size = len(found)
    if size > most:
        raise FileError(f"cannot be read: {path!r} has {size} bytes, and at most {most} are possible")
    return found


def _words(error: Exception) -> str:
    if isinstance(error, OSError):
        return "it is a symbolic link" if error.errno == errno.ELOOP else str(error.strerror)
    return "it has a null byte"
