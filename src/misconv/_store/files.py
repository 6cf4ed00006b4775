"""Files that appear under their name whole or not at all, and files that are only read if they are files.

A write goes into an anonymous file (`O_TMPFILE`), so that a killed process leaves nothing; where the system has none,
into ``.name.misconv-TOKEN.tmp``. Whoever writes holds a lock on it, and the next write into the folder removes those
that nobody holds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TypeAlias

try:
    import fcntl
except ImportError:  # Windows: no locks, and so no removal of what others may be writing
    fcntl = None  # type: ignore[assignment]  # a module elsewhere

__all__ = ["AnyPath", "check_path", "open_regular", "os_error", "shown", "write_bytes", "write_parts"]

AnyPath: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]

_TEMPORARY = re.compile(r"\..*\.misconv-[0-9a-f]{16}\.tmp", re.DOTALL)
# What a system answers that has no anonymous files, or no way to give them a name.
_NO_ANONYMOUS = {
    getattr(errno, name, -1) for name in ("EOPNOTSUPP", "ENOTSUP", "EISDIR", "EINVAL", "ENOENT", "ENOSYS", "EXDEV")
}
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def check_path(path: AnyPath) -> str:
    """The name of a file as text; bytes that are no text become surrogates, as everywhere in Python."""
    if not isinstance(path, str | bytes | os.PathLike):
        raise TypeError(f"path must be a str, bytes or os.PathLike, got {type(path).__name__}")
    try:
        given = os.fspath(path)
    except TypeError as error:
        raise TypeError(f"path must be a str, bytes or os.PathLike, got {type(path).__name__}: {error}") from error
    problem = "nothing" if not given else "one with a null byte" if "\0" in os.fsdecode(given) else None
    try:
        os.fsencode(given)
    except UnicodeEncodeError:
        problem = "one in characters that this system does not use in names"
    if problem is not None:
        raise ValueError(f"path must be the name of a file, got {problem}")
    return os.fsdecode(given)


def shown(name: AnyPath) -> str:
    """A name in a message: on one line, not too long, and in characters that any terminal takes."""
    text = os.fsdecode(name)
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= 300 else f"{text[:150]}…{text[-100:]}"


def os_error(number: int | None, message: str) -> OSError:
    """The error of this number, which says the message and nothing else."""
    made = type(OSError(number, ""))(message)
    made.errno = number
    return made


# Writing -------------------------------------------------------------------------------------------------------------


def write_bytes(path: AnyPath, data: bytes) -> None:
    """Write a file atomically: whatever happens, there is the old file or the new one, never a part of it.

    A link stays, and what it points to is replaced; so do the permissions of a file that is replaced.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"data must be bytes, got {type(data).__name__}")
    write_parts(path, [data])


def write_parts(path: AnyPath, parts: Sequence[bytes | bytearray | memoryview]) -> None:
    """The same, for content in pieces."""
    name = check_path(path)
    try:
        _write(name, Path(os.path.realpath(name)), parts)
    except _Refusal as refusal:
        raise os_error(refusal.number, f"cannot write {shown(name)}: {refusal}") from None
    except OSError as error:
        reason = error.strerror or error
        message = f"cannot write {shown(name)}: {reason}; what was there is untouched"
        raise os_error(error.errno, message) from error


class _Refusal(Exception):
    """A place that is not written to, and why."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number


def _write(name: str, target: Path, parts: Sequence[bytes | bytearray | memoryview]) -> None:
    mode = _check_target(name, target)
    _remove_stale_files(target.parent)
    with _new_file(target) as (file, temporary):
        for part in parts:
            file.write(part)
        file.flush()
        if mode is not None:
            _keep_permissions(file.fileno(), mode)
        os.fsync(file.fileno())
        _link_temporary(file.fileno(), temporary)
        if fcntl is None:
            file.close()  # Windows renames no open file
        os.replace(temporary, target)
    _sync_folder(target.parent)


def _check_target(name: str, target: Path) -> os.stat_result | None:
    """What is known of the file that is to be replaced; None for a new one."""
    if not target.parent.is_dir():
        parent = shown(target.parent)
        exists = os.path.lexists(target.parent)
        reason = f"{parent} is no folder" if exists else f"there is no folder {parent}; create it first"
        raise _Refusal(errno.ENOTDIR if exists else errno.ENOENT, reason)
    if name.endswith(os.sep):
        raise _Refusal(errno.EISDIR, "it is a folder; name a file")
    try:
        found = os.stat(target)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise _Refusal(errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.EINVAL, f"{_what(found)}; name a file")
    if not os.access(target, os.W_OK):
        raise _Refusal(errno.EACCES, "it is write-protected; what was there is untouched")
    return found


def _what(found: os.stat_result) -> str:
    return f"it is {_KINDS.get(stat.S_IFMT(found.st_mode), 'no ordinary file')}"


@contextlib.contextmanager
def _new_file(target: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A new locked file, and the temporary name that it has or will have; the name is gone in the end."""
    number = _open_anonymous(target.parent)
    if number is None:
        number, temporary = _open_named(target)
    else:
        _lock(number)
        temporary = _temporary_name(target)
    try:
        with os.fdopen(number, "wb") as file:
            yield file, temporary
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _temporary_name(target: Path) -> Path:
    """One that nobody has had."""
    # A name has at most 255 bytes, in whatever characters.
    short = os.fsdecode(os.fsencode(target.name)[:200])
    return target.with_name(f".{short}.misconv-{secrets.token_hex(8)}.tmp")


def _open_anonymous(folder: Path) -> int | None:
    if not hasattr(os, "O_TMPFILE") or not os.path.isdir("/proc/self/fd"):
        return None
    try:
        return os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o666)
    except OSError as error:
        if error.errno in _NO_ANONYMOUS:
            return None
        raise


def _open_named(target: Path) -> tuple[int, Path]:
    """A new file that this process holds, and its name; another may sweep it away before it is held, so then once more.

    By another name: who was about to sweep the first one away would take the second one of that name.
    """
    while True:
        path = _temporary_name(target)
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        if not _lock(number) or os.fstat(number).st_nlink:
            return number, path
        os.close(number)


def _link_temporary(number: int, temporary: Path) -> None:
    """Give an anonymous file its temporary name."""
    if os.fstat(number).st_nlink:
        return
    folder = os.open(temporary.parent, os.O_RDONLY)
    try:
        # Only with a folder's descriptor does Python follow the link in /proc to the file.
        os.link(f"/proc/self/fd/{number}", temporary, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def _lock(number: int, *, wait: bool = True) -> bool:
    """Whether this process now holds the file; False also where there are no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _remove_stale_files(folder: Path) -> None:
    """Remove what killed processes have left: temporary files of ours that nobody holds."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _TEMPORARY.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                _remove_stale(entry.path)


def _remove_stale(path: str) -> None:
    with contextlib.suppress(OSError):
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        try:
            if _lock(number, wait=False):
                os.unlink(path)
        finally:
            os.close(number)


def _keep_permissions(number: int, old: os.stat_result) -> None:
    if hasattr(os, "fchmod"):
        with contextlib.suppress(OSError):  # only root may give files away
            os.fchown(number, old.st_uid, old.st_gid)
        os.fchmod(number, stat.S_IMODE(old.st_mode))


def _sync_folder(folder: Path) -> None:
    """Let the new name reach the disk too, where the system can do that for a folder."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


# Reading -------------------------------------------------------------------------------------------------------------


def open_regular(path: AnyPath) -> BinaryIO:
    """An ordinary file, open for reading; pipes and devices, which may never end, are refused unopened."""
    name = check_path(path)
    try:
        found = os.stat(name)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.EINVAL, f"{_what(found)}; name a file")
        # Not blocking, for it may have become a pipe by now.
        number = os.open(name, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError as error:
        message = f"cannot load {shown(name)}: there is no such file; check the name"
        raise os_error(errno.ENOENT, message) from error
    except OSError as error:
        raise os_error(error.errno, f"cannot load {shown(name)}: {error.strerror or error}") from error
    return os.fdopen(number, "rb")
