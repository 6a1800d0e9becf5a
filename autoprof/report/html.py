"""The report as one self-contained HTML file.

The content security policy of the page forbids the browser to load anything, and allows only the scripts of the page,
which are identified by their hashes. So a name in a trace can never run as a script. The only exception: the scripts
may read from the server of the page, for traces that `autoprof open` serves. A page that is opened as a file has none.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from autoprof import __version__
from autoprof.base import files, units
from autoprof.report import charts, model
from autoprof.report.beside import RunTable
from autoprof.report.hang_state import open_for
from autoprof.report.model import DeviceShares, Finding, RunFigures, StepFigures, StepRow
from autoprof.report.overview import without_autoprof
from autoprof.report.remedies import name_of
from autoprof.rundir.file_names import tidy

if TYPE_CHECKING:
    import jinja2


NEEDS = "the HTML report needs jinja2: pip install 'autoprof-rl[report]'; --json and --md work without"
PERFETTO = "https://ui.perfetto.dev"
# Maximum number of rows in the table of steps.
MAX_ROWS = 400
TEMPLATES = Path(__file__).parent / "templates"


class MissingExtra(RuntimeError):
    """jinja2 is not installed. The message names the package to install."""


class Share(msgspec.Struct, frozen=True):
    """One part of a bar that shows shares: the name, the share from 0 to 1, and the colour of the part."""

    name: str
    share: float
    family: str


def write(content: RunFigures | RunTable, path: Path) -> None:
    """Write the page of a report on one run or on several to a file. The file appears only once it is complete.

    Raises:
        MissingExtra: jinja2 is not installed.
        OSError: The page can't be written.
    """
    text = runs_page(content) if isinstance(content, RunTable) else page(content)
    files.write(path, text.encode("utf-8", "backslashreplace"))


def page(figures: RunFigures) -> str:
    """Return the page of a report as HTML.

    Raises:
        MissingExtra: jinja2 is not installed.
    """
    script, perfetto = (_template_text(name) for name in ("page.js", "perfetto.js"))
    kinds = _kinds(figures)
    parts = [_part(part, kinds) for part in figures.loops or [figures]]
    template = _environment().get_template("page.html")
    return template.render(
        run=figures,
        version=figures.autoprof or __version__,
        style=_template_text("page.css"),
        script=script,
        perfetto=perfetto,
        policy=policy(script, perfetto),
        flames=embedded({name: flame for part in parts for name, flame in part["flames"].items()}),
        families={name: charts.family(name, kind) for name, kind in kinds.items()},
        parts=parts,
        open_title=model.open_title(figures.going_on),
        open_for=open_for,
    )


def _part(figures: RunFigures, kinds: dict[str, str]) -> dict[str, Any]:
    """Return the variables of the template for one loop: the whole page, or a part of it if the run has several loops.

    `prefix` keeps the ids and flame graphs of several loops apart.
    """
    prefix = f"loop{figures.loop}-" if figures.loop else ""
    numbers = [step.number for step in figures.details]
    return {
        "run": figures,
        "prefix": prefix,
        "flames": {f"{prefix}{name}": flame for name, flame in _flames(figures.details).items()},
        "chart": charts.steps_chart(figures.steps, kinds) if figures.steps else None,
        "steps": [_step(step, kinds) for step in figures.details],
        "numbers": numbers,
        # The step whose section is unfolded when the page opens: the step of the costliest finding.
        "first": next((each.step for each in figures.findings if each.step in numbers), next(iter(numbers), None)),
        "rows": rows(figures.steps),
        "many": len(figures.steps) > charts.MAX_BARS,
        "stages": [
            Share(stage.name, stage.share, charts.family(stage.name, kinds[stage.name]))
            for stage in figures.stages
            if stage.share is not None
        ],
    }


def runs_page(table: RunTable) -> str:
    """Return the page of a report on several runs as HTML.

    Raises:
        MissingExtra: jinja2 is not installed.
    """
    script = _template_text("page.js")
    kinds = {name: next(filter(None, (row.kinds.get(name) for row in table.runs)), "") for name in table.stages}
    return (
        _environment()
        .get_template("runs.html")
        .render(
            table=table,
            version=__version__,
            style=_template_text("page.css"),
            script=script,
            policy=policy(script),
            families={name: charts.family(name, kind) for name, kind in kinds.items()},
            chart=charts.runs_chart(table.runs, kinds),
        )
    )


def _template_text(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def trace_name(run: str, step: int, loop: int = 0) -> str:
    """Return the name under which `autoprof open` serves the merged trace of a step beside the page.

    From the second loop on, the name contains the number of the loop.
    """
    return f"{tidy(run)}{f'-loop{loop}' if loop > 1 else ''}-step{step}.json.gz"


def _flames(steps: Sequence[StepFigures]) -> dict[str, list[Any]]:
    """Return the flame graphs of all captures in the form that page.js draws."""
    return {
        f"{capture.step}/{capture.name}": [
            [thread.name, thread.us, [[node.parent, node.name, node.category, node.us] for node in thread.nodes]]
            for thread in capture.flame
        ]
        for step in steps
        for capture in step.captures
        if capture.flame
    }


def _kinds(figures: RunFigures) -> dict[str, str]:
    """Return a dict from the name of each stage to its kind, in the order of the charts.

    Stages that only warm-up or captured steps have are included.
    """
    kinds: dict[str, str] = {}
    for part in figures.loops or [figures]:
        kinds |= {stage.name: stage.kind for stage in part.stages if not kinds.get(stage.name)}
        kinds |= {name: row.kinds.get(name, "") for row in part.steps for name in row.stages if name not in kinds}
    return {name: kinds[name] for name in sorted(kinds, key=lambda name: (name == model.OWN, name == model.OTHER))}


def policy(*scripts: str) -> str:
    """Return the content security policy of a page that contains `scripts` and loads nothing from elsewhere."""
    targets = "connect-src 'self'; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; {script_sources(*scripts)}; style-src 'unsafe-inline'; img-src data:; {targets}"


def script_sources(*scripts: str) -> str:
    """Return the directive of a content security policy that allows only `scripts`, by their hashes."""
    digests = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts)
    return " ".join(["script-src", *(f"'sha256-{digest}'" for digest in digests)])


def embedded(content: Any) -> str:
    """Return `content` as JSON for a script element. The JSON can't end the element or begin another element."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def sentence_without_step(finding: Finding) -> str:
    """Return the sentence of a finding without the number of the step. It is shown below the title of the step.

    The name of a stage or an operator stays as it is at the beginning of a sentence.
    """
    text = re.sub(rf"^step {finding.step}(?: \([\w-]+\))?: ", "", finding.text)
    return text if finding.kind in ("slower_stage", "slower_operator") else text[:1].upper() + text[1:]


def sentence_after_step(finding: Finding) -> str:
    """Return the part of a finding's sentence that follows `step` and the number of the step.

    If the sentence does not begin with the step, return the whole sentence after a colon.
    """
    begin = f"step {finding.step}"
    if finding.text.startswith((f"{begin}:", f"{begin} ")):
        return finding.text.removeprefix(begin)
    return f": {finding.text}"


def rows(steps: Sequence[StepRow]) -> list[StepRow]:
    """Return the steps for the table of steps, ordered by number.

    If there are more than `MAX_ROWS` steps, captured steps are preferred, then slow steps, then the longest steps.
    """
    if len(steps) <= MAX_ROWS:
        return list(steps)
    chosen_steps = sorted(steps, key=lambda step: (not step.captured, not step.slow, -step.seconds))[:MAX_ROWS]
    return sorted(chosen_steps, key=lambda step: step.number)


def _step(step: StepFigures, run_kinds: dict[str, str]) -> dict[str, Any]:
    kinds = {**run_kinds, **step.kinds}
    stages = without_autoprof(step.stages)
    whole_s = sum(stages.values()) or 1.0
    samples = step.samples
    return {
        "figures": step,
        "lanes": charts.lanes_chart(step, kinds) if step.lanes else None,
        "longest": charts.longest_chart(samples) if samples is not None and samples.longest else None,
        "done": charts.done_chart(samples) if samples is not None and samples.done else None,
        "shares": [
            Share(name, took / whole_s, charts.family(name, kinds.get(name, ""))) for name, took in stages.items()
        ],
        "own": step.stages.get(model.OWN),
    }


def device_shares(device: DeviceShares) -> list[Share]:
    """Return the parts of a device's time. Each second counts for one part only."""
    communication_alone = device.communication * (1 - (device.overlap or 0.0))
    parts = [
        ("compute", device.compute, "training"),
        ("communication without compute", communication_alone, "weights"),
        ("copy alone", 1 - device.idle - device.compute - communication_alone, "more"),
        ("idle", device.idle, "idle"),
    ]
    return [Share(name, max(0.0, share), colour) for name, share, colour in parts]


@functools.cache
def _environment() -> jinja2.Environment:
    try:
        import jinja2
    except ImportError as error:
        raise MissingExtra(NEEDS) from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("seconds", "change", "rate", "number", "share", "size", "moment", "short"):
        environment.filters[name] = getattr(units, name)
    environment.filters["capitalize_first"] = lambda text: text[:1].upper() + text[1:]
    environment.filters |= {"without_step": sentence_without_step, "after_step": sentence_after_step}
    environment.globals |= {
        "device_shares": device_shares,
        "family_titles": charts.TITLES,
        "trace_name": trace_name,
        "name_of": name_of,
        "perfetto_url": PERFETTO,
    }
    return environment
