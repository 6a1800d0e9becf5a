"""Sources of a run's settings: the environment, then the TOML file, then defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from autoprof.base import files, interrupts
from autoprof.base.originals import os
from autoprof.base.similar import did_you_mean
from autoprof.config import kinds
from autoprof.config.settings import Settings
from autoprof.config.values import (
    FIELDS,
    PREFIX,
    ROLE_FIELDS,
    ROLES,
    SettingsError,
    check,
    check_condition,
    check_table,
    one_line,
    short,
)

CONFIG_FILE = "autoprof.toml"
# No settings file or recipe is larger: each process of a run reads them.
MOST_BYTES = 1 << 20
# The names of variables, without the prefix: of settings, and those that processes of autoprof set for others.
_FURTHER = (
    "CONFIG",
    "RUN_ID",
    "RUN_INFO",
    "RUN_DIR",
    "STARTER",
    "OWN_RANK",
    "LAUNCH",
    "RECIPES_FOUND",
    "SITE",
    "NSYS_REPORT",
    "KEEP_NVTX_INJECTION",
    "TRY",
)
VARIABLES = (*map(str.upper, FIELDS), *_FURTHER)


def load(environ: Mapping[str, str], directory: Path, given: Mapping[str, object] | None = None) -> Settings:
    """Read the settings of the process that starts a run.

    Args:
        environ: The environment, `AUTOPROF_*`.
        directory: The working directory: `autoprof.toml` is looked for there, and paths are relative to it.
        given: Settings that the program gives (`autoprof.start`), over all others.

    Raises:
        SettingsError: One value is wrong.
    """
    values = _from_file(environ.get(PREFIX + "CONFIG", ""), directory)
    for name in FIELDS:
        text = environ.get(PREFIX + name.upper(), "").strip()
        # No steps are the timeline alone.
        if text or (name == "steps" and PREFIX + "STEPS" in environ):
            values[name] = check(name, text, PREFIX + name.upper())
    values |= check_table(dict(given or {}), "", FIELDS)
    values["dir"] = _folder(values.get("dir", Settings().dir), directory)
    return Settings(**values)


def unknown(environ: Iterable[str]) -> list[str]:
    """Return a line for each variable that is named like a setting and is none, with the nearest name."""
    names = sorted(name.removeprefix(PREFIX) for name in environ if name.startswith(PREFIX))
    return [
        f"{PREFIX}{name} is ignored: there is no such setting{did_you_mean(name, VARIABLES, PREFIX)}"
        for name in names
        if name not in VARIABLES
    ]


def unknown_roles(settings: Settings) -> list[str]:
    """Return a line for each word of `roles` that is neither a role that autoprof's recipes have nor a kind."""
    there = (*ROLES, *kinds.KINDS)
    known = (*there, *settings.role)
    words = [pattern.lstrip("!") for pattern in settings.roles]
    return [
        f"{PREFIX}ROLES: {word!r} is neither a role of autoprof's recipes nor a kind of stage"
        f"{did_you_mean(word, there)}; roles are {', '.join(ROLES)}, kinds are {', '.join(kinds.KINDS)}. "
        "It takes nothing unless a recipe or autoprof.stage of yours has it as a role"
        for word in words
        if not any(fnmatchcase(name, word) for name in known)
    ]


def one(name: str, environ: Mapping[str, str], directory: Path) -> Any:
    """Read one setting, whatever the others are. A settings file that can't be read sets nothing.

    Raises:
        SettingsError: It is wrong.
    """
    value, where = environ.get(PREFIX + name.upper(), "").strip(), PREFIX + name.upper()
    if not value:
        path = _file(environ.get(PREFIX + "CONFIG", ""), directory)
        try:
            value, where = _decoded(path).get(name, ""), f"{path}: {name}"
        except (OSError, ValueError, RecursionError) as error:
            interrupts.pass_on(error)
    read = check(name, value, where) if value else getattr(Settings(), name)
    return _folder(read, directory) if name == "dir" else read


def _folder(path: str, directory: Path) -> str:
    return os.path.abspath(directory / Path(path).expanduser())


def _file(named: str, directory: Path) -> Path:
    return directory / Path(named or CONFIG_FILE).expanduser()


def _from_file(named: str, directory: Path) -> dict[str, Any]:
    path = _file(named, directory)
    try:
        content = _decoded(path)
    except FileNotFoundError as error:
        interrupts.pass_on(error)
        if named:
            raise SettingsError(f"AUTOPROF_CONFIG: there is no file {str(path)!r}; it takes a TOML file") from None
        return {}
    except (OSError, ValueError, RecursionError) as error:
        interrupts.pass_on(error)
        raise SettingsError(f"{path}: it can't be read as TOML ({one_line(error)})") from None
    roles, when = content.pop("role", {}), content.get("when")
    tables = content.pop("when") if isinstance(when, list) and any(isinstance(each, dict) for each in when) else []
    values = check_table(content, f"{path}: ", FIELDS)
    if tables:
        values["when"] = tuple(check_condition(table, f"{path}: [[when]]") for table in tables)
    if not isinstance(roles, dict) or not all(isinstance(table, dict) for table in roles.values()):
        raise SettingsError(f"{path}: role: got {short(roles)}; it takes tables named [role.NAME]")
    values["role"] = {name: check_table(table, f"{path}: [role.{name}] ", ROLE_FIELDS) for name, table in roles.items()}
    return values


def _decoded(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = msgspec.toml.decode(files.of_user(path, MOST_BYTES))
    return content
