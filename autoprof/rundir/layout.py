"""Layout of a run directory: the paths of its files and folders, its JSON files, and the cache of a large run.

A JSON file may be damaged, or written by another release or another program. So the reader decodes each field
separately: it leaves out a field of the wrong type, keeps all other fields, and reports the fields left out. It keeps
fields unchanged that the struct does not define.

The cache `.cache.msgpack` keeps content that commands have read from files, so that the next command is faster. It has
named parts. Each part has the inodes, sizes and times of change of the files whose content it keeps. If one of these
files has changed, the part is ignored. The whole cache is ignored if it is damaged, or if another release or another
user wrote it. Users can remove the file at any time.
"""

from __future__ import annotations

import errno
import functools
import math
import re
import stat
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Raw, Struct

from autoprof import __version__
from autoprof.base import files, identity, log, seam
from autoprof.base.originals import json, os
from autoprof.base.redact import writable
from autoprof.base.seam import described, text
from autoprof.rundir import file_names
from autoprof.rundir.file_names import LINES

# Folder for the stacks of crashed processes.
CRASHES = "crashes"
# Beginning of the ids of runs that autoprof generates.
_GENERATED_ID = re.compile(r"[0-9]{8}-[0-9]{6}-|slurm-|mpi-|ranks-")
# Name of the folder that is the default of AUTOPROF_DIR. Only autoprof writes to a folder with this name.
_DEFAULT_RUNS = "autoprof_runs"


def write_json(path: Path, content: Any) -> None:
    """Write a struct or other JSON content to a file. The file appears only when it is complete. Make its folder.

    Raises:
        OSError: The file can't be written.
    """
    files.folder(path.parent)
    files.write(path, json.dumps(content, indent=1, default=_plain).encode() + b"\n")


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value) if isinstance(value, Struct) else str(value)


# Maximum size in bytes and nesting depth of a file. Every file that autoprof writes is smaller and less deeply nested.
_MAX_BYTES = 64 << 20
_MAX_DEPTH = 16
# Maximum number of problems that are reported per file.
_MAX_PROBLEMS = 5
# Blank values for missing fields. A field gets the first of these values that the type of the field accepts.
_BLANKS: tuple[Any, ...] = (None, "", 0, [], {})

T = TypeVar("T", bound=Struct)


def read_json(path: Path, kind: type[T], left_out: list[str] | None = None) -> T:
    """Read a JSON file as a struct. Missing and invalid fields get a blank value. Never raises.

    Args:
        path: The file.
        kind: The type of the struct.
        left_out: List to which one text with the reasons is added if fields were left out.
    """
    return record(fields(path, kind, left_out), kind)


def record(content: Mapping[str, Any], kind: type[T]) -> T:
    """Return fields as a struct. Missing fields and fields of the wrong type get a blank value."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError:
        return msgspec.convert({**blanks(kind), **_kept(dict(content), kind, "", [])}, kind)


def fields(path: str | Path, kind: type[Struct], left_out: list[str] | None = None) -> dict[str, Any]:
    """Return the valid fields of a JSON file as a dict, including fields that the struct does not define. Never raises.

    Args:
        path: The file. If the file does not exist, the dict is empty.
        kind: The type of the struct.
        left_out: List to which one text with the reasons is added if fields were left out.
    """
    problems: list[str] = []
    content: Any = {}
    try:
        data = _read(path)
        if (undamaged := _valid_fields(data, kind)) is not None:
            return undamaged
        content = _writable(json.loads(data), _MAX_DEPTH)
        if not isinstance(content, dict):
            problems.append("it is not a JSON object")
    except (OSError, ValueError, RecursionError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links
        seam.pass_on(error)
        if not isinstance(error, FileNotFoundError):
            problems.append(f"it can't be read: {getattr(error, 'strerror', None) or str(error)[:100]}")
    valid_fields: dict[str, Any] = _kept(content, kind, "", problems) if isinstance(content, dict) else {}
    if left_out is not None and problems:
        more_problems = [f"and {len(problems) - _MAX_PROBLEMS} more"] if len(problems) > _MAX_PROBLEMS else []
        left_out.append(writable(f"{os.path.basename(path)}: {'; '.join([*problems[:_MAX_PROBLEMS], *more_problems])}"))
    return valid_fields


def _read(path: str | Path) -> bytes:
    try:
        return files.read(path, _MAX_BYTES)
    except OSError as error:
        seam.pass_on(error)
        if error.errno != errno.ELOOP:  # the path is not a symbolic link
            raise
    return files.read(os.path.realpath(path, strict=True), _MAX_BYTES)


def _valid_fields(content: bytes, kind: type[Struct]) -> dict[str, Any] | None:
    """Return the fields of a file if all fields are valid, or None if each field must be checked separately.

    This function is fast for a valid file. A run may have thousands of files, and nearly all of them are valid.
    """
    if content.count(b"{") + content.count(b"[") > _MAX_DEPTH:
        return None
    with seam.suppress(ValueError, RecursionError):
        fields: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
        msgspec.convert(fields, kind)
        return fields
    return None


_hints = functools.lru_cache(typing.get_type_hints)


@functools.cache
def blanks(kind: type[Struct]) -> dict[str, Any]:
    return {field.encode_name: _blank(field.type) for field in msgspec.structs.fields(kind) if field.required}


def _blank(kind: Any) -> Any:
    for blank in _BLANKS:
        try:
            msgspec.convert(blank, kind)
        except msgspec.ValidationError:
            continue
        return blank
    raise TypeError(f"no blank value fits the type {kind}")


def _kept(value: Any, kind: Any, where: str, problems: list[str]) -> Any:
    """Return the valid parts of a value, or `msgspec.UNSET` if the value has no valid part.

    Args:
        value: The value from JSON.
        kind: The type that the value should have.
        where: The path of the value in the file, for `problems`.
        problems: List to which a text is added for each invalid part.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(value, dict) and origin is types.UnionType:  # an optional struct
        kind = next((member for member in arguments if isinstance(member, type) and issubclass(member, Struct)), kind)
    typed_fields: Any = None
    if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, Struct):
        field_types = _hints(kind, include_extras=True)
        typed_fields = {name: (field, field_types.get(name, Any)) for name, field in value.items()}
    elif isinstance(value, dict) and origin is dict:
        typed_fields = {name: (entry, arguments[1]) for name, entry in value.items()}
    if typed_fields is not None:
        valid_fields = {
            name: _kept(field, field_type, f"{where}.{name}".strip("."), problems)
            for name, (field, field_type) in typed_fields.items()
        }
        return {name: field for name, field in valid_fields.items() if field is not msgspec.UNSET}
    if isinstance(value, list) and origin is list:
        entries = [_kept(entry, arguments[0], f"{where}[{index}]", problems) for index, entry in enumerate(value)]
        return [entry for entry in entries if entry is not msgspec.UNSET]
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problems.append(f"{where[:80]} is left out ({str(error)[:80]})")
        return msgspec.UNSET


def _writable(content: Any, depth: int) -> Any:
    """Return the content in a form that JSON and terminals accept.

    Lone surrogates are replaced. NaN and infinity become texts.

    Raises:
        ValueError: The content has more than `depth` nested lists or objects.
    """
    if isinstance(content, str):
        return writable(content)
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    if isinstance(content, (dict, list)) and not depth:
        raise ValueError(f"it has more than {_MAX_DEPTH} nested lists or objects")
    if isinstance(content, dict):
        return {writable(name): _writable(value, depth - 1) for name, value in content.items()}
    return [_writable(value, depth - 1) for value in content] if isinstance(content, list) else content


class StepFolder(NamedTuple):
    """The folder of a captured step: the number of the step's loop, the number of the step, and the folder's name."""

    loop: int
    number: int
    name: str


def step_folders(run: str | Path) -> list[StepFolder]:
    """Return the step folders in a run directory, sorted by loop and number."""
    folders = [step_folder(name) for name in files.folders_in(run)]
    return sorted(folder for folder in folders if folder is not None)


def step_folder(name: str) -> StepFolder | None:
    """Return the step and the loop that the name of a folder contains. Return None for any other name."""
    number, _, loop = name.removeprefix(file_names.STEP).partition(file_names.LOOP)
    if not (number.isdecimal() and (loop or "1").isdecimal()):
        return None
    # Readers compute the name of the folder from the numbers. So a folder with any other spelling is skipped.
    folder = StepFolder(int(loop or 1), int(number), name)
    return folder if name == _step(folder.number, folder.loop) else None


def _step(number: int, loop: int = 1, prefix: str = file_names.STEP) -> str:
    return f"{prefix}{number:06d}" + (f"{file_names.LOOP}{loop}" if loop > 1 else "")


def hang_name(step: int, loop: int) -> str:
    """Return the name of the folder in `hangs/` for a step that takes too long."""
    return _step(step, loop, "step_")


class RunDir:
    """The directory with all output of a run. Creating this object does not create the directory.

    Attributes:
        path: The path of the directory.
        run_json: The file with the facts about the run.
        exit_status: The file with the exit status of the process that started the run.
        control: The folder with the requests to the run.
        oom: The folder for the snapshots that are taken when CUDA's allocator runs out of memory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_json = path / file_names.RUN
        self.exit_status = path / file_names.EXIT
        self.control = path / "control"
        self.oom = path / "oom"

    def process_file(self, folder: str, ending: str = LINES) -> Path:
        """Return the path of this process's file in `folder`, which is `journal`, `clocks` or `crashes`."""
        return self.path / folder / f"{identity.HOST}-{os.getpid()}{ending}"

    def lines(self, folder: str) -> list[Path]:
        """Return the paths of the files of all processes in `folder`, which is `journal` or `clocks`, sorted."""
        return sorted((self.path / folder).glob(f"*{LINES}"), key=str)

    def make(self, folder: Path) -> Path:
        """Make the run directory and a folder in it, if they do not exist. Return the folder.

        Raises:
            OSError: The run directory or the folder can't be made, or is a symbolic link.
        """
        runs = self.path.parent
        is_own_folder = runs.name == _DEFAULT_RUNS
        status = files.status(self.path, follow=False)
        if status is None or not stat.S_ISDIR(status.st_mode):
            is_own_folder = is_own_folder or not files.is_folder(runs)
            files.folder(self.path, run_folder_count=2)
        files.folder(folder)
        if is_own_folder:
            _hide_from_git(runs)
        return folder

    def unwritable(self, error: BaseException) -> str:
        """Return the warning for a run directory that can't be written.

        All callers log the same text, so that it is logged only once.
        """
        problem = text(error)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            problem = os.strerror(error.errno)  # a full disk concerns all files
        return f"can't write to {self.path}: {problem}; nothing is recorded there until it can be written"

    def report(self, what: str, error: BaseException, log_line: Callable[[str], None] = log.warning_once) -> None:
        """Log an error of autoprof's own work for this run.

        Args:
            what: A text that describes the work.
            error: The exception that the work raised.
            log_line: Function that logs one line.
        """
        log_line(self.unwritable(error) if isinstance(error, OSError) else f"{what}: {described(error)}")

    def step(self, number: int, loop: int = 1) -> Path:
        """Return the folder of a global step."""
        return self.path / _step(number, loop)

    def steps(self) -> list[Path]:
        """Return the paths of the existing step folders, sorted by loop and number."""
        return [self.path / folder.name for folder in step_folders(self.path)]

    def parts(self) -> Iterator[Path]:
        """Yield the paths of incomplete files: a process is writing them, or died while it was writing them.

        Omit the files of running merges, and files that only reserve the name of a capture.
        """
        # `rglob` is not used, because it raises if a folder is renamed during the search.
        for parent, folders, present in files.walk(self.path):
            names = [
                name
                for name in (*folders, *present)
                if name.endswith(file_names.PART) and not name.startswith(file_names.MERGING)
            ]
            names = [name for name in names if not name.endswith(file_names.TAKEN)]
            yield from (Path(parent, name) for name in names)
            folders[:] = [
                name
                for name in folders
                if not name.endswith((file_names.PART, file_names.NPU_FOLDER)) and name != file_names.COLLECTING
            ]

    def point_latest(self) -> None:
        """Point the link `latest` in the parent folder to this run. If `latest` is not a link to a run, keep it."""
        link = self.path.with_name("latest")
        if files.exists(link, follow=False) and not _points_to_run(link):
            log.warning_once(f"{link} is not a link to a run, so autoprof does not change it")
            return
        part = link.with_name(f"{link.name}.{os.urandom(4).hex()}{file_names.PART}")
        with seam.suppress(OSError):  # a file system without links
            os.symlink(self.path.name, part)
            os.replace(part, link)
        files.remove(str(part))


def _points_to_run(link: Path) -> bool:
    """Return True if a path is a link to a run in the same folder.

    Also return True if the run was removed, if the link names an id that autoprof generated.
    """
    target = files.link_target(link)
    if os.sep in target or target in ("", ".", ".."):
        return False
    run = link.with_name(target)
    return files.exists(run / file_names.RUN, follow=False) or (
        not files.exists(run, follow=False) and _GENERATED_ID.match(target) is not None
    )


def _hide_from_git(folder: Path) -> None:
    """Hide a folder from git and from Ray's upload of `working_dir`, unless it already has a `.gitignore`.

    Ray uploads the files that no `.gitignore` excludes, and refuses more than 512 MiB (Ray 2.60,
    ray/_private/runtime_env/packaging.py).
    """
    path = folder / ".gitignore"
    if not files.exists(path, follow=False):
        with seam.suppress(OSError):
            files.write(path, b"*\n")


# Name of the file in `control/` that switches autoprof off in the run.
OFF = "off"


# A process with an open span writes at least one journal line in this period, as a sign of life.
MAX_SILENCE_NS = 30_000_000_000


def look_s() -> float:
    """Return the time between two checks of a process's watcher, in seconds. Tests set a shorter time."""
    milliseconds = os.environ.get("AUTOPROF_LOOK_MS", "")
    return int(milliseconds) / 1000 if milliseconds.isdecimal() else 10.0


def switched_off(run: RunDir) -> bool:
    """Return True if autoprof is switched off in the run."""
    return files.exists(run.control / OFF, follow=False)


# Total size of a run's journals, in bytes, from which the run gets a cache. Smaller journals are read within a second.
WORTH_BYTES = 64 << 20
_MAX_CACHE_BYTES = 1 << 30

# Inode, size and time of change (in nanoseconds) of a file. If they are equal, the file has not changed.
Stamp = tuple[int, int, int]
C = TypeVar("C")


class _CacheFile(Struct):
    """Content of `.cache.msgpack`: the release of autoprof that wrote it, and the encoded parts by name."""

    release: str
    parts: dict[str, Raw]


def stamp(path: str | os.PathLike[str]) -> Stamp | None:
    """Return the inode, the size and the time of change of a file or folder; None if it does not exist.

    If two stamps of a file are equal, the file has not changed between them.
    """
    status = files.status(path)
    return None if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)


def stamps_of_run(run: Path) -> dict[str, Stamp]:
    """Return a dict from path to stamp, for each file of a run except the cache and reports.

    For the files of a step, the dict has only the folder of the step.
    """
    stamps: dict[str, Stamp] = {}
    for parent, folders, names in files.walk(run):
        steps = [name for name in folders if name.startswith(file_names.STEP)]
        folders[:] = [name for name in folders if name not in steps]
        if parent == str(run):
            names = [name for name in names if name != file_names.CACHE and not name.startswith("report.")]
        for name in (*steps, *names):
            if (current := stamp(f"{parent}/{name}")) is not None:
                stamps[f"{parent}/{name}"] = current
    return stamps


def is_large(stamps: dict[str, Stamp]) -> bool:
    """Return True if journals with these stamps are so large that a cache saves time."""
    return sum(size for _, size, _ in stamps.values()) > WORTH_BYTES


def get_cached(run: Path, part: str, kind: type[C], hook: Callable[[type, Any], Any] | None = None) -> C | None:
    """Return a part of the cache of a run, decoded as `kind`. Return None if the cache does not have that part.

    `hook` is msgspec's `dec_hook`.
    """
    raw = _cached_parts(run).get(part)
    with seam.suppress(msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return None if raw is None else msgspec.msgpack.decode(raw, type=kind, dec_hook=hook)
    return None


def put_cached(run: Path, part: str, content: Any, hook: Callable[[Any], Any] | None = None) -> None:
    """Write a part of the cache of a run. Errors are ignored, because the cache only saves time.

    `hook` is msgspec's `enc_hook`.
    """
    with seam.suppress(OSError, msgspec.MsgspecError, ValueError, OverflowError):
        encoded = Raw(msgspec.msgpack.encode(content, enc_hook=hook))
        files.open_as(run)
        cache_file = _CacheFile(__version__, _cached_parts(run) | {part: encoded})
        files.write(run / file_names.CACHE, msgspec.msgpack.encode(cache_file))


def _cached_parts(run: Path) -> dict[str, Raw]:
    with seam.suppress(OSError, msgspec.MsgspecError, ValueError, RecursionError):
        content = files.read(run / file_names.CACHE, _MAX_CACHE_BYTES, (os.getuid(), os.stat(run).st_uid))
        cache_file = msgspec.msgpack.decode(content, type=_CacheFile)
        if cache_file.release == __version__:
            return cache_file.parts
    return {}
