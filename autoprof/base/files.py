"""Safe creation of a run's files: for their user alone, or for the group to read, and never through a link.

Whoever may write in a folder of the run can put links where autoprof is going to write. So autoprof creates each file
anew, and opens what is there only if it is a regular file. The finisher uses this too: standard library only.

No file gets the number 0, 1 or 2. A program may have closed these numbers and still write to them: Python writes what
is left in the buffer of `sys.stdout` at exit.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import stat
import sys

from autoprof.base import interrupts, process
from autoprof.base.interrupts import suppress
from autoprof.base.originals import fcntl, io, os
from autoprof.base.size_limits import check_size as check_size
from autoprof.base.size_limits import no_size_signal as no_size_signal
from autoprof.base.size_limits import size_limit as size_limit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterator
    from typing import Any

# Nobody has to wait to open a pipe; a link is an error.
_CAREFULLY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Programs seldom have as many files open.
_HIGH = 700


class _State(process.State):
    """What this process knows of its files.

    Attributes:
        group: True if the group may read what this process makes.
        low_closed: True if a file has got the number 0, 1 or 2: the program has closed that number.
    """

    def begin(self) -> None:
        self.group = False
        self.low_closed = False


_state = _State()


def open_to_group(allowed: bool) -> None:
    """Set whether the group may read what this process makes from here on."""
    _state.group = allowed


def open_as(folder: str | os.PathLike[str]) -> None:
    """Let the group read what this process makes where it may read the run's folder."""
    open_to_group(bool(os.stat(folder).st_mode & stat.S_IRGRP))


def folder(path: str | os.PathLike[str], own: int = sys.maxsize) -> None:
    """Make a folder and its parents, if they do not exist.

    Args:
        path: The folder.
        own: The number of folders at the end of the path that get the permissions of the run's files. Those above
            belong to the user: they get the permissions that the umask gives.

    Raises:
        OSError: It can't be made; a file or a link is in its place.
    """
    place = os.fspath(path)
    missing: list[str] = []
    while not _made(place, len(missing) < own):
        missing.append(place)
        place = os.path.dirname(place)
        if place in ("", missing[-1]):
            break
    while missing:
        place = missing.pop()
        # There are disks where nothing can be made though the parent exists: /proc, and deleted folders.
        if not _made(place, len(missing) < own):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place)


def descriptor(
    path: str | os.PathLike[str], flags: int, mode: int = 0o600, *, dir_fd: int | None = None, held: bool = False
) -> int:
    """Open a file as `os.open` does, but never as 0, 1 or 2. Also an `opener` for `open`.

    Args:
        held: The file stays open while the program runs: its number is 700 or above.

    Raises:
        OSError: It can't be opened.
    """
    if _state.low_closed:
        with low_numbers_taken():
            number = os.open(path, flags, mode, dir_fd=dir_fd)
    else:
        number = os.open(path, flags, mode, dir_fd=dir_fd)
    if number > 2 and not held:
        return number
    _state.low_closed |= number < 3
    try:
        return high(number)
    finally:
        os.close(number)


@contextlib.contextmanager
def low_numbers_taken() -> Iterator[None]:
    """Take 0, 1 and 2 if they are closed, so that no file gets these numbers meanwhile.

    Reading and writing fail with EBADF as they do without: the numbers are opened with O_PATH.

    Raises:
        OSError: Too many files are open.
    """
    taken: list[int] = []
    try:
        while (number := os.open("/", os.O_PATH | os.O_CLOEXEC)) < 3:
            taken.append(number)
        os.close(number)
        yield
    finally:
        for number in taken:
            os.close(number)


def high(number: int) -> int:
    """Return a copy of a descriptor with a number of 700 or above, or as high as the limit of open files allows.

    Raises:
        OSError: Too many files are open.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    lowest = _HIGH if soft == resource.RLIM_INFINITY or soft > _HIGH else max(3, soft // 2)
    return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, lowest)


def create(path: str | os.PathLike[str], held: bool = False) -> int:
    """Replace a file by a new, empty one, and return its descriptor for writing.

    Args:
        held: As for `descriptor`.

    Raises:
        OSError: It can't be made.
    """
    with suppress(FileNotFoundError):
        os.unlink(path)
    return _create(path, held)


def claim(path: str | os.PathLike[str]) -> bool:
    """Make an empty file; return False where something has the name. Of several who try at a time one succeeds.

    Raises:
        OSError: It can't be made.
    """
    try:
        os.close(_create(path))
    except FileExistsError as error:
        interrupts.pass_on(error)
        return False
    return True


def write(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file that appears under its name once it is complete.

    Raises:
        OSError: It can't be written.
    """
    check_size(len(content))
    # No other process has a part of this name, even where processes of a run have the same pid.
    part = f"{os.fspath(path)}.{os.urandom(4).hex()}.part"
    try:
        with io.open(_create(part), "wb") as file:
            file.write(content)
        os.replace(part, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(part)
        name_whole(error, path)
        raise


def name_whole(error: Any, path: str | os.PathLike[str]) -> None:
    """Put the name of a file in place of its part's name into an `OSError`: no user knows the name of a part."""
    name = error.filename if issubclass(type(error), OSError) else None
    if type(name) is str and ".part" in (name[-5:], os.path.dirname(name)[-5:]):
        error.filename = os.fspath(path)
        # The text of an error with None in this place ends in `-> None`.
        del error.filename2


def append(path: str | os.PathLike[str], content: bytes, first: bytes = b"") -> None:
    """Add to a file in one write, or begin it, with `first` before the content. Content without room is left out whole.

    Raises:
        OSError: It can't be written; something else is in its place.
    """
    file = descriptor(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _CAREFULLY)
    try:
        found = _regular(file, path)
        if _state.group and not found.st_mode & stat.S_IRGRP:
            _show(file, 0o640)
        if found.st_size == 0:
            content = first + content
        check_size(found.st_size + len(content))
        if os.write(file, content) < len(content):
            os.ftruncate(file, found.st_size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))
    finally:
        os.close(file)


def opened(path: str | os.PathLike[str]) -> int:
    """Open a file that somebody else may have made, for reading.

    Raises:
        OSError: It can't be read, or is no regular file.
    """
    file = descriptor(path, os.O_RDONLY | _CAREFULLY)
    try:
        _regular(file, path)
    except OSError:
        os.close(file)
        raise
    return file


def read(path: str | os.PathLike[str], most: int, owners: Container[int] | None = None) -> bytes:
    """Return the content of a file that somebody else may have made, if it has no more than `most` bytes.

    Raises:
        OSError: It can't be read, is no regular file, is too large, or belongs to none of `owners`.
    """
    with io.open(descriptor(path, os.O_RDONLY | _CAREFULLY), "rb") as file:
        found = _regular(file.fileno(), path)
        if found.st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most} bytes", os.fspath(path))
        if owners is not None and found.st_uid not in owners:
            raise OSError(errno.EPERM, f"it belongs to user {found.st_uid}", os.fspath(path))
        return file.read(most)


def of_user(path: str | os.PathLike[str], most: int) -> bytes:
    """Read a file that the user names, which may be a link or a pipe, if it has no more than `most` bytes.

    Raises:
        OSError: It can't be read, or is too large.
    """
    with io.open(path, "rb", opener=descriptor) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", os.fspath(path))
    # Editors put it in front of UTF-8, where TOML takes none.
    return content.removeprefix(b"\xef\xbb\xbf")


def text(path: str | os.PathLike[str]) -> str:
    """Return the text of a file of the kernel, such as `/proc/meminfo`.

    Raises:
        OSError: It can't be read.
    """
    with io.open(path, opener=descriptor) as file:
        return file.read()


def status(path: str | os.PathLike[str], *, follow: bool = True) -> os.stat_result | None:
    """Return the status of a file, or None if there is none.

    `os.path.exists` and its like catch every `OSError`, also a `TimeoutError` that a signal handler raises. The program
    would lose it.

    Args:
        follow: False for a link itself instead of its target.
    """
    try:
        return os.stat(path, follow_symlinks=follow)
    except (OSError, ValueError) as error:
        interrupts.pass_on(error)
        return None


def exists(path: str | os.PathLike[str], *, follow: bool = True) -> bool:
    """Return True if the file or folder exists. See `status`."""
    return status(path, follow=follow) is not None


def is_folder(path: str | os.PathLike[str], *, follow: bool = True) -> bool:
    """Return True if `path` is a folder. See `status`."""
    found = status(path, follow=follow)
    return found is not None and stat.S_ISDIR(found.st_mode)


def is_file(path: str | os.PathLike[str]) -> bool:
    """Return True if `path` is a regular file, or a link to one. See `status`."""
    found = status(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def empty(path: str | os.PathLike[str]) -> None:
    """Free the disk space of a file; do nothing where there is none, or where it has other names."""
    with suppress(OSError):
        file = descriptor(path, os.O_WRONLY | _CAREFULLY)
        try:
            found = os.fstat(file)
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
                os.ftruncate(file, 0)
        finally:
            os.close(file)


def remove(*paths: str) -> None:
    """Remove files and folders that may be there; a link itself, not its target."""
    for path in paths:
        found = status(path, follow=False)
        if found is not None and stat.S_ISDIR(found.st_mode):
            _remove_folder(path)
        elif found is not None:
            # Kineto keeps a file open that it could not write, and with it the disk space (torch 2.13).
            empty(path)
            with suppress(FileNotFoundError):
                os.unlink(path)


def show(path: str | os.PathLike[str]) -> None:
    """Give a file that somebody else made the permissions of the run's files."""
    with suppress(OSError):
        os.chmod(path, 0o640 if _state.group else 0o600)


def _made(path: str, own: bool) -> bool:
    """Make a folder if it does not exist. Return False if its parent does not exist. `own`: as in `folder`."""
    try:
        os.mkdir(path, 0o700 if own else 0o777)
    except FileNotFoundError as error:
        interrupts.pass_on(error)
        return False
    except FileExistsError as error:
        interrupts.pass_on(error)
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise
    else:
        _show(path, 0o750 if own else stat.S_IMODE(os.stat(path).st_mode) | 0o050)
    return True


def _create(path: str | os.PathLike[str], held: bool = False) -> int:
    file = descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CAREFULLY, held=held)
    _show(file, 0o640)
    return file


def _show(made: int | str | os.PathLike[str], mode: int) -> None:
    """Let the group read what was just made, whatever the umask, if it may. Some disks have no permissions."""
    if _state.group:
        with suppress(OSError):
            os.chmod(made, mode | (os.stat(made).st_mode & stat.S_ISGID))


def _regular(file: int, path: str | os.PathLike[str]) -> os.stat_result:
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no file", os.fspath(path))
    return found


def walk(path: str | os.PathLike[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk through a folder as `os.walk` does, without losing what a signal handler raises."""
    return os.walk(path, onerror=interrupts.pass_on)


def _remove_folder(path: str) -> None:
    """Remove what can be removed of a folder. `ignore_errors` would lose what a signal handler raises."""
    from autoprof.base.originals import shutil  # which few processes need

    if sys.version_info >= (3, 12):
        shutil.rmtree(path, onexc=lambda _, __, error: interrupts.pass_on(error))
    else:
        shutil.rmtree(path, onerror=lambda _, __, raised: interrupts.pass_on(raised[1]))


def size(path: str) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    found = os.stat(path)
    if not stat.S_ISDIR(found.st_mode):
        return found.st_size
    return sum(os.lstat(os.path.join(place, name)).st_size for place, _, names in walk(path) for name in names)
