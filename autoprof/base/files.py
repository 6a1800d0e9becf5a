"""Safe creation of a run's files: only the run's user, or also the group, can read them. Links are never followed.

A user who may write in a folder of the run can put links there under the names of autoprof's files. So autoprof creates
each file anew, and opens an existing file only if it is a regular file. The finisher, the process that compresses
traces, imports this module, too. So the module uses only the standard library.

No file of autoprof gets the descriptor 0, 1 or 2. A program may have closed these descriptors and still write to them:
at exit, Python writes the buffer of `sys.stdout`. Such output must not get into a file of autoprof.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import stat
import sys

from autoprof.base import process, seam
from autoprof.base.originals import fcntl, io, os
from autoprof.base.seam import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator
    from typing import Any

# With these flags, opening a link fails, and opening a pipe does not wait.
_CAREFULLY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Minimum descriptor of files that stay open. Few programs have this many open files.
_HIGH = 700


class _FilesState(process.State):
    """Permissions and descriptors of the files of this process.

    Attributes:
        group: True if the group may read the files that this process makes.
        low_closed: True if the program has closed the descriptor 0, 1 or 2. This is known once a file has got it.
    """

    def reset(self) -> None:
        self.group = False
        self.low_closed = False


_state = _FilesState()


def open_to_group(allowed: bool) -> None:
    """If `allowed`, let the group read the files that this process makes from now on; else only the user."""
    _state.group = allowed


def open_as(folder: str | os.PathLike[str]) -> None:
    """If the group may read the run's folder, let the group read the files that this process makes from now on."""
    open_to_group(bool(os.stat(folder).st_mode & stat.S_IRGRP))


def folder(path: str | os.PathLike[str], run_folder_count: int = sys.maxsize) -> None:
    """Make a folder and its parents, if they do not exist.

    Args:
        path: The folder.
        run_folder_count: The number of folders at the end of the path that get the permissions of the run's files. The
            folders above belong to the user and get the permissions that the umask gives.

    Raises:
        OSError: The folder can't be made, or a file or link is in its place.
    """
    current = os.fspath(path)
    missing_paths: list[str] = []
    while not _make_folder(current, len(missing_paths) < run_folder_count):
        missing_paths.append(current)
        current = os.path.dirname(current)
        if current in ("", missing_paths[-1]):
            break
    while missing_paths:
        current = missing_paths.pop()
        # `mkdir` can fail with ENOENT though the parent exists: in /proc, and in deleted folders.
        if not _make_folder(current, len(missing_paths) < run_folder_count):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), current)


def descriptor(path: str | os.PathLike[str], flags: int, *, held: bool = False) -> int:
    """Open a file as `os.open` does, but never as descriptor 0, 1 or 2. This function can be an `opener` of `open`.

    Args:
        held: True if the file stays open while the program runs. Its descriptor is then 700 or above.

    Raises:
        OSError: The file can't be opened.
    """
    if _state.low_closed:
        with low_numbers_taken():
            number = os.open(path, flags, 0o600)
    else:
        number = os.open(path, flags, 0o600)
    if number > 2 and not held:
        return number
    _state.low_closed |= number < 3
    try:
        return high(number)
    finally:
        os.close(number)


@contextlib.contextmanager
def low_numbers_taken() -> Iterator[None]:
    """Occupy the descriptors 0, 1 and 2 if they are closed, so that no file gets them meanwhile.

    The descriptors are opened with O_PATH. So reading and writing them fails with EBADF, as for closed descriptors.

    Raises:
        OSError: Too many files are open.
    """
    numbers: list[int] = []
    try:
        while (number := os.open("/", os.O_PATH | os.O_CLOEXEC)) < 3:
            numbers.append(number)
        os.close(number)
        yield
    finally:
        for number in numbers:
            os.close(number)


def high(number: int) -> int:
    """Return a duplicate of a descriptor. Its number is 700 or above, or less if the limit of open files is less.

    Raises:
        OSError: Too many files are open.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    lowest = _HIGH if soft == resource.RLIM_INFINITY or soft > _HIGH else max(3, soft // 2)
    return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, lowest)


def create(path: str | os.PathLike[str], held: bool = False) -> int:
    """Replace a file by a new, empty one, and return its descriptor for writing.

    Args:
        path: The file.
        held: As in `descriptor`.

    Raises:
        OSError: The file can't be made.
    """
    with suppress(FileNotFoundError):
        os.unlink(path)
    return _create(path, held)


def claim(path: str | os.PathLike[str]) -> bool:
    """Make an empty file, and return True. Return False if the name exists already.

    If several processes try at the same time, only one succeeds.

    Raises:
        OSError: The file can't be made for another reason.
    """
    with suppress(FileExistsError):
        os.close(_create(path))
        return True
    return False


def write(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file. The file appears under its name only when it is complete.

    Raises:
        OSError: The file can't be written.
    """
    check_size(len(content))
    # The name is random, because processes of a run may have the same pid.
    part = f"{os.fspath(path)}.{os.urandom(4).hex()}.part"
    try:
        with io.open(_create(part), "wb") as file:
            file.write(content)
        os.replace(part, path)
        part = ""
    except OSError as error:
        set_full_path(error, path)
        raise
    finally:
        if part:
            with suppress(OSError):
                os.unlink(part)


def set_full_path(error: Any, path: str | os.PathLike[str]) -> None:
    """Replace the name of a `.part` file in an `OSError` by the final name `path`, because users know only `path`."""
    name = error.filename if issubclass(type(error), OSError) else None
    if type(name) is str and ".part" in (name[-5:], os.path.dirname(name)[-5:]):
        error.filename = os.fspath(path)
        # With `filename2 = None`, the text of the error would end in `-> None`.
        del error.filename2


def size_limit() -> int | None:
    """Return the maximum size in bytes of a file that this process may write, or None if there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def check_size(size: int) -> None:
    """Check that a file may have `size` bytes. Writing a larger file sends SIGXFSZ, which may end the process.

    Raises:
        OSError: The size is over the limit.
    """
    limit = size_limit()
    if limit is not None and size > limit:
        raise OSError(errno.EFBIG, f"{os.strerror(errno.EFBIG)}: the limit is {limit} bytes (ulimit -f)")


def append(path: str | os.PathLike[str], content: bytes) -> None:
    """Append to a file in one write, and create it if needed. If there is no room for all content, write nothing.

    Raises:
        OSError: The file can't be written, or is not a regular file.
    """
    file = descriptor(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _CAREFULLY)
    try:
        file_status = _regular(file, path)
        if _state.group and not file_status.st_mode & stat.S_IRGRP:
            _set_mode_for_group(file, 0o640)
        _append_all(file, file_status.st_size, content, path)
    finally:
        os.close(file)


def _append_all(file: int, size: int, content: bytes, path: str | os.PathLike[str]) -> None:
    """Append `content` to an open file, which has `size` bytes. If there is no room for all content, write nothing."""
    # If there is no limit, this condition saves two calls for each journal line.
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        check_size(size + len(content))
    if os.write(file, content) < len(content):
        os.ftruncate(file, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))


class HeldFile:
    """A file that stays open while the program runs.

    A program may close the descriptor, and another file may get its number. Then this class leaves that file alone.
    """

    _descriptor = -1
    # Device, inode, and True if the file has a name in a folder. Some file systems do not count names.
    _identity: tuple[int, int, bool] | None = None

    def _hold(self, file_descriptor: int) -> os.stat_result:
        """Take over an open descriptor, which `close` closes later. Return the status of the file."""
        status = os.fstat(file_descriptor)
        self._descriptor, self._identity = file_descriptor, _identity(status)
        return status

    def is_own(self) -> bool:
        """Return True if the descriptor still belongs to this file."""
        with suppress(OSError):
            return self._identity is not None and _identity(os.fstat(self._descriptor))[:2] == self._identity[:2]
        return False

    def close(self) -> None:
        """Close the file, if the descriptor still belongs to it.

        Raises:
            OSError: The file is on a network file system, and the disk is full.
        """
        is_own, file_descriptor, self._descriptor = self._descriptor >= 0 and self.is_own(), self._descriptor, -1
        if is_own:
            os.close(file_descriptor)

    def __del__(self) -> None:
        with suppress(OSError):
            self.close()


def _identity(status: os.stat_result) -> tuple[int, int, bool]:
    return status.st_dev, status.st_ino, status.st_nlink > 0


class OwnFile(HeldFile):
    """A file to which only this process appends. If the file is moved or removed, the next write makes a new file.

    Args:
        path: The file. If another file has this name, a number is put before the ending: `.2`, `.3`, ... This happens
            because processes of several containers can have the same pid, and because a program that replaces itself by
            `exec` keeps its pid.
        make: Function that makes the folder of the file if the folder does not exist.
        head: Function that returns the bytes with which each new file begins.
    """

    def __init__(self, path: str | os.PathLike[str], make: Callable[[], object], head: Callable[[], bytes]) -> None:
        self._path = self._first_path = os.fspath(path)
        self._make = make
        self._head = head
        self._is_synced = True

    def append(self, content: bytes) -> bool:
        """Append `content` in one write, all or nothing. Return True if this is the first write to a new file.

        Raises:
            OSError: The file can't be written.
        """
        try:
            status = os.fstat(self._descriptor)
            is_own = (status.st_dev, status.st_ino, status.st_nlink > 0) == self._identity
        except OSError as error:  # the file was not opened yet, or the program has closed it
            seam.pass_on(error)
            is_own = False
        if not is_own:
            status = self._open()
        is_new = status.st_size == 0
        _append_all(self._descriptor, status.st_size, self._head() + content if is_new else content, self._path)
        self._is_synced = False
        return is_new

    def _open(self) -> os.stat_result:
        """Open the file again if the path still leads to it, else make a new file. Return the status of the file."""
        with suppress(OSError):
            self.close()
        if self._identity is not None:
            with suppress(OSError):
                number = descriptor(self._path, os.O_WRONLY | os.O_APPEND | _CAREFULLY, held=True)
                if _identity(status := os.fstat(number)) == self._identity:
                    self._descriptor = number
                    return status
                os.close(number)
        self._make()
        number, self._path = numbered(self._first_path)
        return self._hold(number)

    def is_moved(self) -> bool:
        """Return True if the path leads to another file, or to no file. `append` does not notice a moved folder."""
        try:
            return _identity(os.lstat(self._path))[:2] != (self._identity or ())[:2]
        except OSError as error:  # a program that has become another user may not see the file
            seam.pass_on(error)
            return error.errno == errno.ENOENT

    def sync(self) -> None:
        """Write the content to the disk. Some file systems, such as NFS and FUSE, report a full disk only at this call.

        Raises:
            OSError: The content can't be written.
        """
        if not self._is_synced and self.is_own():
            self._is_synced = True
            os.fdatasync(self._descriptor)


def numbered(path: str) -> tuple[int, str]:
    """Make a file for appending that stays open. If the name exists, a number such as `.2` is put before the ending.

    Returns:
        The descriptor and the path of the file.

    Raises:
        OSError: The file can't be made for another reason.
    """
    begin, ending = os.path.splitext(path)
    count = 1
    while True:
        with suppress(FileExistsError):
            number = descriptor(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | _CAREFULLY, held=True)
            _set_mode_for_group(number, 0o640)
            return number, path
        count += 1
        path = f"{begin}.{count}{ending}"


def opened(path: str | os.PathLike[str]) -> int:
    """Open a file for reading that another user may have made. Return the descriptor.

    Raises:
        OSError: The file can't be read, or is not a regular file.
    """
    file = descriptor(path, os.O_RDONLY | _CAREFULLY)
    try:
        _regular(file, path)
    except OSError:
        os.close(file)
        raise
    return file


_PAGE_BYTES = 4096


def read(path: str | os.PathLike[str], max_bytes: int, owners: Container[int] | None = None) -> bytes:
    """Return the content of a file that another user may have made.

    Args:
        path: The file.
        max_bytes: The maximum size of the file.
        owners: Ids of the users that the file may belong to; None for any user.

    Raises:
        OSError: The file can't be read, is not a regular file, is too large, or belongs to another user.
    """
    with io.open(descriptor(path, os.O_RDONLY | _CAREFULLY), "rb") as file:
        status = _regular(file.fileno(), path)
        if status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes", os.fspath(path))
        if owners is not None and status.st_uid not in owners:
            raise OSError(errno.EPERM, f"it belongs to user {status.st_uid}", os.fspath(path))
        # Python allocates memory for all bytes that it is asked to read, so ask only for the size of the file. Add a
        # page, because the file may have grown meanwhile.
        return file.read(min(max_bytes, status.st_size + _PAGE_BYTES))


def try_read(path: str | os.PathLike[str], max_bytes: int) -> bytes | None:
    """Return the content of a file as `read` does, or None if it can't be read."""
    with suppress(OSError):
        return read(path, max_bytes)
    return None


def read_user_file(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Return the content of a file that the user named. The file may be a link or a pipe.

    Args:
        path: The file.
        max_bytes: The maximum size of the file.

    Raises:
        OSError: The file can't be read, or is too large.
    """
    with io.open(path, "rb", opener=descriptor) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes", os.fspath(path))
    # Some editors put a byte order mark before UTF-8, which TOML does not allow.
    return content.removeprefix(b"\xef\xbb\xbf")


def text(path: str | os.PathLike[str], max_bytes: int = -1) -> str:
    """Return the text of a file of the kernel, such as `/proc/meminfo`, or an empty text if it can't be read."""
    with suppress(OSError), io.open(path, "rb", buffering=0, opener=descriptor) as file:
        return file.read(max_bytes).decode(errors="replace")
    return ""


def link_target(path: str | os.PathLike[str]) -> str:
    """Return the target of a link, or an empty text if the path is not a link."""
    with suppress(OSError):
        return os.readlink(path)
    return ""


def names_in(folder: str | os.PathLike[str]) -> list[str]:
    """Return the sorted names in a folder, or an empty list if the folder does not exist or can't be read."""
    with suppress(OSError):
        return sorted(os.listdir(folder))
    return []


def folders_in(folder: str | os.PathLike[str]) -> list[str]:
    """Return the sorted names of the folders in a folder, or an empty list if the folder can't be read.

    The status of a file takes long on network file systems. This function asks only for the status of links.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())
    return []


def status(path: str | os.PathLike[str], *, follow: bool = True) -> os.stat_result | None:
    """Return the status of a file, or None if the file does not exist or its status can't be read.

    `os.path.exists` and similar functions catch every `OSError`, also a `TimeoutError` that a signal handler raises.
    The program would lose that exception.

    Args:
        path: The file.
        follow: False for the status of a link itself instead of its target.
    """
    try:  # each use of `suppress` takes three calls
        return os.stat(path, follow_symlinks=follow)
    except (OSError, ValueError) as error:
        seam.pass_on(error)
        return None


def exists(path: str | os.PathLike[str], *, follow: bool = True) -> bool:
    """Return True if the file or folder exists. Unlike in `status`, a missing file causes no exception inside."""
    try:
        return os.access(path, os.F_OK, effective_ids=True, follow_symlinks=follow)
    except ValueError as error:
        seam.pass_on(error)
        return False


def is_folder(path: str | os.PathLike[str], *, follow: bool = True) -> bool:
    """Return True if `path` is a folder. See `status` for the reason not to use `os.path.isdir`."""
    result = status(path, follow=follow)
    return result is not None and stat.S_ISDIR(result.st_mode)


def is_file(path: str | os.PathLike[str]) -> bool:
    """Return True if `path` is a regular file, or a link to a regular file. See `status`, too."""
    result = status(path)
    return result is not None and stat.S_ISREG(result.st_mode)


def empty(path: str | os.PathLike[str]) -> None:
    """Free the disk space of a file. Do nothing if the file does not exist, or has several names (hard links)."""
    with suppress(OSError):
        file = descriptor(path, os.O_WRONLY | _CAREFULLY)
        try:
            result = os.fstat(file)
            if stat.S_ISREG(result.st_mode) and result.st_nlink == 1:
                os.ftruncate(file, 0)
        finally:
            os.close(file)


def remove(*paths: str) -> None:
    """Remove files and folders if they exist. If a path is a link, remove the link, not its target."""
    for path in paths:
        result = status(path, follow=False)
        if result is not None and stat.S_ISDIR(result.st_mode):
            _remove_folder(path)
        elif result is not None:
            # If Kineto can't write a file, Kineto leaves the file open, so its disk space stays in use (torch 2.13).
            empty(path)
            with suppress(FileNotFoundError):
                os.unlink(path)


def show(path: str | os.PathLike[str]) -> None:
    """Set the permissions of a file that another program made to the permissions of the run's files."""
    with suppress(OSError):
        os.chmod(path, 0o640 if _state.group else 0o600)


def _make_folder(path: str, belongs_to_run: bool) -> bool:
    """Make a folder if it does not exist. Return False if the parent does not exist, else True.

    `belongs_to_run` is True if the folder gets the permissions of the run's files.
    """
    try:
        os.mkdir(path, 0o700 if belongs_to_run else 0o777)
    except FileNotFoundError as error:
        seam.pass_on(error)
        return False
    except FileExistsError as error:
        seam.pass_on(error)
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise
    else:
        _set_mode_for_group(path, 0o750 if belongs_to_run else stat.S_IMODE(os.stat(path).st_mode) | 0o050)
    return True


def _create(path: str | os.PathLike[str], held: bool = False) -> int:
    file = descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CAREFULLY, held=held)
    _set_mode_for_group(file, 0o640)
    return file


def _set_mode_for_group(target: int | str | os.PathLike[str], mode: int) -> None:
    """If the group may read the run's files, set the mode of a new file or folder regardless of the umask."""
    if _state.group:
        with suppress(OSError):  # some file systems have no permissions
            os.chmod(target, mode | (os.stat(target).st_mode & stat.S_ISGID))


def _regular(file: int, path: str | os.PathLike[str]) -> os.stat_result:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    return status


def walk(path: str | os.PathLike[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk through a folder as `os.walk` does, but raise the exceptions of signal handlers."""
    return os.walk(path, onerror=seam.pass_on)


def _remove_folder(path: str) -> None:
    """Remove a folder and its content, except files that can't be removed.

    `ignore_errors=True` would also ignore exceptions of signal handlers, so each error is passed to `seam.pass_on`.
    """
    from autoprof.base.originals import shutil  # few processes need it

    if sys.version_info >= (3, 12):
        shutil.rmtree(path, onexc=lambda _, __, error: seam.pass_on(error))
    else:
        shutil.rmtree(path, onerror=lambda _, __, raised: seam.pass_on(raised[1]))


def size(path: str) -> int:
    """Return the size in bytes of a file, or of all files in a folder."""
    status = os.stat(path)
    if not stat.S_ISDIR(status.st_mode):
        return status.st_size
    return sum(os.lstat(os.path.join(folder, name)).st_size for folder, _, names in walk(path) for name in names)
