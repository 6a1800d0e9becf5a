"""Hooks of mkdocs: links that lead out of docs/ work in the repository, and are plain text on the site."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_MARK = re.compile(r"^ *<!-- (?:needs|until|status|runs in): .* -->\n", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Take out marks for the tests, and links that have no page on the site."""
    folder = posixpath.dirname(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        if "://" in found[2]:
            return found[0]
        place = posixpath.normpath(posixpath.join(folder, found[2]))
        return found[1] if place.startswith("../") else found[0]

    return _LINK.sub(link, _MARK.sub("", markdown))
