"""Ray's key-value store, where this process is connected to Ray: small things that all processes of a run share.

Everything in it is under one namespace. A call is a round trip to the cluster's head, a few hundred microseconds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

_NAMESPACE = b"autoprof"


def up() -> bool:
    """Whether there is a store. Ray is not imported for it."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(getattr(ray, "is_initialized", bool)())


def put(key: str, value: bytes, overwrite: bool = True) -> bool:
    """Keep `value`, without `overwrite` only where nothing is kept yet; returns whether there is a store."""
    if not up():
        return False
    _kv()._internal_kv_put(key.encode(), value, overwrite=overwrite, namespace=_NAMESPACE)
    return True


def claim(key: str) -> bool:
    """Keep an empty value under `key`; False where somebody has done so. Of those who try it one succeeds.

    Where there is no store, everybody does.
    """
    return not up() or not _kv()._internal_kv_put(key.encode(), b"", overwrite=False, namespace=_NAMESPACE)


def get(key: str) -> bytes | None:
    """What is kept under `key`, or None."""
    found: bytes | None = _kv()._internal_kv_get(key.encode(), namespace=_NAMESPACE) if up() else None
    return found


def delete(key: str) -> bool:
    """Keep nothing under `key` any more. Of those who try at a time, one is told that there was something."""
    return up() and bool(_kv()._internal_kv_del(key.encode(), namespace=_NAMESPACE))


def keys(prefix: str) -> Sequence[str]:
    """The keys that begin so, in order."""
    if not up():
        return ()
    return sorted(key.decode() for key in _kv()._internal_kv_list(prefix.encode(), namespace=_NAMESPACE))


def entries(prefix: str) -> dict[str, bytes]:
    """All that is kept under keys that begin so, in two round trips (with Ray 2.60)."""
    found = keys(prefix)
    client = getattr(_kv(), "global_gcs_client", None) if found else None
    if client is None or not hasattr(client, "internal_kv_multi_get"):
        return {key: value for key in found if (value := get(key)) is not None}
    many = client.internal_kv_multi_get([key.encode() for key in found], _NAMESPACE)
    return {key.decode(): value for key, value in many.items()}


def _kv() -> Any:
    from ray.experimental import internal_kv

    return internal_kv
