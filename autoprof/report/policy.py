"""What the content security policies of autoprof's pages share."""

from __future__ import annotations

import base64
import hashlib


def script_sources(*scripts: str) -> str:
    """The directive of a content security policy that lets only these scripts run, by their hashes."""
    digests = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts)
    return " ".join(["script-src", *(f"'sha256-{digest}'" for digest in digests)])
