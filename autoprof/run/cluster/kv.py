"""Ray's key-value store, where this process is connected to Ray: small values that all processes of a run share.

All keys are in one namespace. A call is a round trip to the cluster's head, a few hundred microseconds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

_NAMESPACE = b"autoprof"


def up() -> bool:
    """Return whether this process is connected to Ray, without importing it."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(getattr(ray, "is_initialized", bool)())


def address() -> str:
    """Return HOST:PORT of the cluster that this process is connected to; an empty text if it is a client of Ray's.

    A client (`ray://`) does not know the address of the cluster's head.
    """
    import ray

    return "" if ray.util.client.ray.is_connected() else str(ray.get_runtime_context().gcs_address)


def put(key: str, value: bytes, overwrite: bool = True) -> bool:
    """Keep `value`, without `overwrite` only where nothing is kept yet; return whether there is a store."""
    if not up():
        return False
    _kv()._internal_kv_put(key.encode(), value, overwrite=overwrite, namespace=_NAMESPACE)
    return True


def claim(key: str) -> bool:
    """Keep an empty value under `key`; return False where another process has. Of several that try one succeeds.

    Where there is no store, all succeed.
    """
    return not up() or not _kv()._internal_kv_put(key.encode(), b"", overwrite=False, namespace=_NAMESPACE)


def get(key: str) -> bytes | None:
    """Return the value under `key`, or None."""
    found: bytes | None = _kv()._internal_kv_get(key.encode(), namespace=_NAMESPACE) if up() else None
    return found


def delete(key: str) -> bool:
    """Delete `key`; return whether it had a value, which is so for one of several that try at a time."""
    return up() and bool(_kv()._internal_kv_del(key.encode(), namespace=_NAMESPACE))


def keys(prefix: str) -> Sequence[str]:
    """Return the keys that begin with `prefix`, in order."""
    if not up():
        return ()
    return sorted(key.decode() for key in _kv()._internal_kv_list(prefix.encode(), namespace=_NAMESPACE))


def entries(prefix: str) -> dict[str, bytes]:
    """Return the values of all keys that begin with `prefix`, in two round trips (with Ray 2.60)."""
    found = keys(prefix)
    client = getattr(_kv(), "global_gcs_client", None) if found else None
    if client is None or not hasattr(client, "internal_kv_multi_get"):
        return {key: value for key in found if (value := get(key)) is not None}
    many = client.internal_kv_multi_get([key.encode() for key in found], _NAMESPACE)
    return {key.decode(): value for key, value in many.items()}


def _kv() -> Any:
    from ray.experimental import internal_kv

    return internal_kv
