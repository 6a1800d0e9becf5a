"""The report as one self-contained HTML file.

The content security policy of the page forbids the browser to load anything, and allows only the scripts of the page,
which are identified by their hashes. So a name in a trace can never run as a script.
"""

from __future__ import annotations

import base64
import functools
import gzip
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
from autoprof.report.hang_state import open_for
from autoprof.report.model import DeviceShares, Finding, RunFigures, StepFigures, StepRow
from autoprof.report.overview import without_autoprof

if TYPE_CHECKING:
    import jinja2


NEEDS = "the HTML report needs plotly and jinja2: pip install 'autoprof-rl[report]'; --json and --md work without"
# Maximum number of rows in the table of steps.
MAX_ROWS = 400
TEMPLATES = Path(__file__).parent / "templates"


class MissingExtra(RuntimeError):
    """plotly or jinja2 is not installed. The message names the package to install."""


class Share(msgspec.Struct, frozen=True):
    """One part of a bar that shows shares: the name, the share from 0 to 1, and the look of the part."""

    name: str
    share: float
    look: charts.Look


def write(figures: RunFigures, path: Path) -> None:
    """Write the page of a report to a file. The file appears only once it is complete.

    Raises:
        MissingExtra: plotly or jinja2 is not installed.
        OSError: The page can't be written.
    """
    files.write(path, page(figures).encode("utf-8", "backslashreplace"))


def page(figures: RunFigures) -> str:
    """Return the page of a report as HTML.

    Raises:
        MissingExtra: plotly or jinja2 is not installed.
    """
    plotly = _plotly()
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    kinds = _kinds(figures)
    looks = charts.choose_looks(kinds, kinds)
    steps = [_step(step, looks, kinds) for step in figures.details]
    numbers = [step.number for step in figures.details]
    plots = {"run": charts.run_plot(figures.steps, looks)} if figures.steps else {}
    for step in steps:
        plots |= step["plots"]
    template = _environment().get_template("page.html")
    return template.render(
        run=figures,
        version=figures.autoprof or __version__,
        style=(TEMPLATES / "page.css").read_text(encoding="utf-8"),
        script=script,
        plotly=_compressed_script(plotly),
        policy=policy(plotly, script),
        plots=embedded(plots),
        looks=looks,
        steps=steps,
        numbers=numbers,
        # The step whose section is unfolded when the page opens: the step of the costliest finding.
        first=next((each.step for each in figures.findings if each.step in numbers), numbers[0] if numbers else None),
        rows=rows(figures.steps),
        open_title=model.open_title(figures.going_on),
        open_for=open_for,
        many=len(figures.steps) > charts.MAX_BARS,
        stages=[
            Share(stage.name, stage.share, looks[stage.name]) for stage in figures.stages if stage.share is not None
        ],
    )


def _kinds(figures: RunFigures) -> dict[str, str]:
    """Return a dict from the name of each stage to its kind, in the order of the charts.

    Stages that only warm-up or captured steps have are included.
    """
    kinds = {stage.name: stage.kind for stage in figures.stages}
    kinds |= {name: row.kinds.get(name, "") for row in figures.steps for name in row.stages if name not in kinds}
    return {name: kinds[name] for name in sorted(kinds, key=lambda name: (name == model.OWN, name == model.OTHER))}


def policy(*scripts: str) -> str:
    """Return the content security policy of a page that contains `scripts` and loads nothing."""
    targets = "base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; {script_sources(*scripts)}; style-src 'unsafe-inline'; img-src data: blob:; {targets}"


def script_sources(*scripts: str) -> str:
    """Return the directive of a content security policy that allows only `scripts`, by their hashes."""
    digests = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts)
    return " ".join(["script-src", *(f"'sha256-{digest}'" for digest in digests)])


def embedded(content: Any) -> str:
    """Return `content` as JSON for a script element. The JSON can't end the element or begin another element."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def sentence_without_step(finding: Finding) -> str:
    """Return the sentence of a finding without the number of the step. It is shown below the title of the step."""
    text = re.sub(rf"^step {finding.step}(?: \([\w-]+\))?: ", "", finding.text)
    return text[:1].upper() + text[1:]


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


def _step(step: StepFigures, run_looks: dict[str, charts.Look], kinds: dict[str, str]) -> dict[str, Any]:
    names = [*run_looks, *step.stages, *(span.name for lane in step.lanes for span in lane.spans)]
    spans = {span.name: span.stage_kind for lane in step.lanes for span in lane.spans if span.stage_kind}
    looks = charts.choose_looks([*names, *charts.CROWDS.values()], {**kinds, **step.kinds, **spans})
    plots: dict[str, charts.Plot] = {}
    spans_left_out = 0
    if step.lanes:
        plots[f"lanes-{step.number}"], spans_left_out = charts.lanes_plot(step, looks)
    if step.samples is not None and step.samples.longest:
        plots[f"samples-{step.number}"] = charts.longest_plot(step.samples)
    if step.samples is not None and step.samples.done:
        plots[f"done-{step.number}"] = charts.done_plot(step.samples)
    stages = without_autoprof(step.stages)
    whole_s = sum(stages.values()) or 1.0
    shares = [Share(name, took / whole_s, looks[name]) for name, took in stages.items()]
    return {
        "figures": step,
        "plots": plots,
        "shares": shares,
        "own": step.stages.get(model.OWN),
        "spans_left_out": spans_left_out,
    }


def device_shares(device: DeviceShares) -> list[Share]:
    """Return the parts of a device's time. Each second counts for one part only."""
    communication_alone = device.communication * (1 - (device.overlap or 0.0))
    parts = [
        ("compute", device.compute, "generation", ""),
        ("communication without compute", communication_alone, "training", "/"),
        ("copy alone", 1 - device.idle - device.compute - communication_alone, "scoring", "."),
        ("idle", device.idle, "idle", ""),
    ]
    return [
        Share(name, max(0.0, share), charts.Look(f"{charts.TOKEN}{kind}", pattern))
        for name, share, kind, pattern in parts
    ]


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingExtra(NEEDS) from error
    return str(get_plotlyjs()).replace("</script", "<\\/script")


def _compressed_script(script: str) -> str:
    """Return a script that is compressed with gzip and encoded as base64. page.js unpacks it.

    plotly.js is packed in this way, because it is larger than all the rest of a page.
    """
    return base64.b64encode(gzip.compress(script.encode(), 6, mtime=0)).decode()


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
    environment.filters |= {"without_step": sentence_without_step, "after_step": sentence_after_step}
    environment.globals["device_shares"] = device_shares
    return environment
