"""Connection of a command to a Ray cluster that the user or a run names. Imports Ray when it connects."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Any

from autoprof.base.exception_text import reason
from autoprof.base.exceptions import type_name
from autoprof.base.originals import os
from autoprof.base.redact import hidden

# How long a node has for an answer: Ray may have to start a worker there.
_PATIENCE_S = 60.0
# How long its head has to be there at all.
_HEAD_S = 5.0


class Unreachable(Exception):
    """The cluster can't be reached. The message says what was tried and what is wrong."""


class Gone(Exception):
    """The run can't be looked at any more. The message says why."""


class Lost(Gone):
    """The cluster itself is not there any more. A call of Ray's then waits for a minute, and ends the process."""


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """Yield the module `ray`, connected to the cluster at `address`, as `ray.init` takes it, until the block ends.

    Raises:
        Unreachable: It is not there, or is of another release; or the address names no cluster.
    """
    if "local" in (address, os.environ.get("RAY_ADDRESS") if address == "auto" else ""):
        raise Unreachable("'local' starts a Ray cluster and names none; give HOST:PORT of one that is running")
    try:
        import ray
    except ImportError:
        raise Unreachable("there is no Ray here; take the environment of the run's driver") from None
    try:
        # Where nothing listens `ray.init` tries for a quarter of an hour (Ray 2.60, ray/_private/node.py).
        if "://" not in address:
            _reach(address)
    except (OSError, OverflowError, UnicodeError) as error:
        said = getattr(error, "strerror", None) or error
        raise Unreachable(hidden(f"no Ray cluster at {address!r}: nothing answers there ({said})")) from None
    try:
        # Workers of a cluster that a run started would think that they belong to it.
        off = {"env_vars": {"AUTOPROF": "0"}}
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=off)
    except Exception as error:
        raise Unreachable(hidden(f"can't connect to the Ray cluster at {address!r}: {_why(error)}")) from None
    try:
        yield ray
    except Lost:
        raise
    except BaseException:
        ray.shutdown()
        raise
    ray.shutdown()


def _why(error: Exception) -> str:
    """Return what failed, and what to do if it may be the token.

    A missing token is a ConnectionError like others. Only lines of Ray's C++ code on stderr name it (Ray 2.60,
    gcs_client.cc: "InvalidAuthToken").
    """
    said = hidden(" ".join(reason(error).split()), 300)
    kind = type_name(error)
    what = said if said == kind else f"{kind}: {said}"
    if not issubclass(type(error), ConnectionError):
        return what
    return f"{what}; if the cluster has token authentication, set RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN here"


def _reach(address: str) -> None:
    """Connect to HOST:PORT, if the address is of that form.

    Raises:
        OSError: Nothing listens there.
        OverflowError: There is no such port.
        UnicodeError: The host's name is none.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _HEAD_S).close()
