"""The first page of `autoprof open`, with links to the report and to the trace of a step."""

from __future__ import annotations

import html as markup
import string

from autoprof.report.page.html import TEMPLATES, script_sources
from autoprof.report.page.server import PERFETTO, Content
from autoprof.rundir.file_names import REPORT


def report_item() -> str:
    """Return the line of the report."""
    return f'<li><a href="{REPORT}">The report</a>: where the time went</li>'


def trace_item(run: str, step: int, name: str) -> str:
    """Return the line of a step's trace, which is served as `name`."""
    return (
        f'<li><button type="button" data-perfetto="{PERFETTO}" data-trace="{markup.escape(name)}" '
        f'data-title="{markup.escape(f"{run}, step {step}")}">Open step {step} in Perfetto</button> '
        f'or <a href="{markup.escape(name)}" download>keep its trace</a></li>'
    )


def page(run: str, items: list[str]) -> Content:
    """Make the page of a run. It may read what the server has beside it, and nothing else."""
    script = (TEMPLATES / "index.js").read_text(encoding="utf-8")
    template = string.Template((TEMPLATES / "index.html").read_text(encoding="utf-8"))
    text = template.substitute(run=markup.escape(run), items="\n".join(items), script=script)
    own = f"{script_sources(script)}; connect-src 'self'; style-src 'unsafe-inline'; img-src data:"
    policy = f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return Content(kind="text/html; charset=utf-8", text=text, policy=policy)
