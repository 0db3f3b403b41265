"""The report of a run as one page of HTML: facts, curves, memory by tier, samples and settings.

The page needs no script, no network and no other file, and its content security policy allows none.
It follows the reader's light or dark theme, and fits a phone.
"""

import dataclasses
import html
from collections.abc import Iterable, Mapping, Sequence

from zerojax.machines import format_bytes
from zerojax.planner import element
from zerojax.reporting.charts import build_charts, draw_chart
from zerojax.reporting.folder import METRICS, replace_file
from zerojax.reporting.history import Series
from zerojax.reporting.sessions import RUNNING, Session
from zerojax.reporting.settings import Setting
from zerojax.reporting.summary import format_duration

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1c1c1c; --pale: #595959; --rule: #d4d4d4;
  --panel: #f4f5f7; --bad: #a3211b; --s0: #1f6fb4; --s1: #b4501a; --s2: #1d7a3e; --s3: #7a4fa3;
  --s4: #a8324a; --s5: #6b6b2a; }
@media (prefers-color-scheme: dark) { :root { --page: #15171a; --text: #e6e6e6; --pale: #a8a8a8;
  --rule: #3d4147; --panel: #1f2226; --bad: #ff8f85; --s0: #6cb6ff; --s1: #ffa657; --s2: #6fd08c;
  --s3: #c9a2f2; --s4: #ff8fa3; --s5: #d1cf6f; } }
* { box-sizing: border-box; }
body { background: var(--page); color: var(--text); font: 15px/1.45 system-ui, sans-serif;
  max-width: 1200px; margin: 0 auto; padding: 16px; overflow-wrap: anywhere; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 18px; margin: 32px 0 8px; }
h3 { font-size: 15px; margin: 12px 0 4px; }
.state { margin: 4px 0 12px; color: var(--pale); }
.problems { border-left: 4px solid var(--bad); background: var(--panel); padding: 8px 14px;
  margin: 12px 0; }
.problems h2 { color: var(--bad); font-size: 15px; margin: 0; }
.problems ul { margin: 4px 0; padding-left: 20px; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 270px), 1fr));
  gap: 10px 24px; margin: 0; }
dt { color: var(--pale); font-size: 13px; } dd { margin: 0; font-variant-numeric: tabular-nums; }
pre { background: var(--panel); padding: 10px 12px; margin: 4px 0; white-space: pre-wrap;
  font: 13px/1.4 ui-monospace, monospace; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr));
  gap: 20px 28px; }
figure { margin: 0; min-width: 0; } figcaption { font-weight: 600; }
.chart { max-width: 620px; }
.chart > svg { display: block; width: 100%; height: auto; overflow: visible;
  font-size: 12px; }
@media (min-width: 520px) { .chart > svg { font-size: 10px; } }
@media (min-width: 800px) { .chart:first-child { grid-column: span 2; max-width: 800px; }
  .chart:first-child > svg { font-size: 6.5px; } .chart:first-child .line { stroke-width: 1.1; } }
.chart text { fill: var(--pale); }
.grid { stroke: var(--rule); stroke-width: 0.7; } .axis { stroke: var(--pale); fill: none; }
.line { fill: none; stroke-width: 1.7; stroke-linejoin: round; }
.band { stroke: none; opacity: 0.22; } .dot { fill: var(--page); stroke-width: 1.5; }
.cross { fill: none; stroke-width: 1.3; }
.s0 { stroke: var(--s0); } .s1 { stroke: var(--s1); } .s2 { stroke: var(--s2); }
.s3 { stroke: var(--s3); } .s4 { stroke: var(--s4); } .s5 { stroke: var(--s5); }
.band.s0 { fill: var(--s0); } .band.s1 { fill: var(--s1); } .band.s2 { fill: var(--s2); }
.band.s3 { fill: var(--s3); } .band.s4 { fill: var(--s4); } .band.s5 { fill: var(--s5); }
.line.s1 { stroke-dasharray: 7 4; } .line.s2 { stroke-dasharray: 2 3; }
.line.s3 { stroke-dasharray: 9 3 2 3; } .line.s4 { stroke-dasharray: 14 4; }
.line.s5 { stroke-dasharray: 4 2 1 2 1 2; }
.key { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 2px 0 0;
  padding: 0; font-size: 13px; }
.bar { display: block; width: 100%; height: 18px; margin: 2px 0 10px; }
.bar .room { fill: var(--panel); stroke: var(--rule); }
.bar .stripe { fill: var(--s0); stroke: var(--page); stroke-width: 2; }
.bar .stripe:nth-of-type(odd) { fill-opacity: 0.6; }
.bar .capacity { stroke: var(--bad); stroke-width: 3; }
table { border-collapse: collapse; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: 3px 16px 3px 0;
  border-bottom: 1px solid var(--rule); }
th { font-weight: normal; color: var(--pale); overflow-wrap: break-word; }
td.number, th.number { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.whole { white-space: nowrap; }
summary { cursor: pointer; margin: 8px 0; }
footer { margin: 32px 0 0; color: var(--pale); font-size: 13px; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@dataclasses.dataclass(frozen=True)
class Sample:
    """A text that the model generated.

    Attributes:
      prompt: beginning of the text, which the model was given.
      text: its continuation.
    """

    prompt: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The contents of the page.

    Attributes:
      name: name of the run.
      facts: facts by name: when, how long, how far, how well, how fast.
      problems: what went wrong, in words.
      trace: traceback of the error that ended the run, or "".
      series: values of each figure, by its name.
      tiers: bytes per device, {tier: {kind: bytes}}; None if unknown.
      capacity: bytes of each tier that one device may use.
      samples: texts that the model generated.
      sessions: the processes of the run; the last one is the current one.
      options: options of the run.
      config: fields of the program's ZeroConfig.
      machine: versions, devices and memory, by name.
      written: date and time at which the page is written.
    """

    name: str
    facts: Mapping[str, str]
    problems: Sequence[str]
    trace: str
    series: Mapping[str, Series]
    tiers: Mapping[str, Mapping[str, int]] | None
    capacity: Mapping[str, float | None]
    samples: Sequence[Sample]
    sessions: Sequence[Session]
    options: Sequence[Setting]
    config: Sequence[Setting]
    machine: Mapping[str, str]
    written: str


def write_page(path: str, report: Report) -> None:
    """Replace the page's file by a rename, so that a reader sees the old page or the new one.

    Args:
      path: path of the file.
      report: contents of the page.

    Raises:
      OSError: the file could not be written, for example on a full disk; the old page remains.
    """
    replace_file(path, [render_page(report).encode()])


def render_page(report: Report) -> str:
    """Return the page as HTML."""
    name = escape(report.name)
    session = report.sessions[-1]
    state = f"{session.state[:1].upper()}{session.state[1:]}"
    note = " Reload the page for newer figures." if session.state == RUNNING else ""
    charts = "".join(draw_chart(chart) for chart in build_charts(report.series))
    sections = [
        _render_problems(report.problems, report.trace),
        f"<dl>{_render_facts(report.facts)}</dl>",
        _render_section("Command", f"<pre>{escape(session.command)}</pre>"),
        _render_section(
            "Curves",
            f'<div class="charts">{charts}</div>' if charts else "<p>No figures were reported.</p>",
        ),
        _render_section("Samples", "".join(map(_render_sample, report.samples))),
        _render_section("Memory per device", _render_tiers(report.tiers, report.capacity)),
        _render_section("Sessions", _render_sessions(report.sessions)),
        _render_section("Options", _render_settings(report.options, "options")),
        _render_section("ZeroConfig", _render_settings(report.config, "fields")),
        _render_section("Versions and devices", _render_table(report.machine)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<link rel="icon" href="data:,">\n<title>{name}: {escape(_shorten(state))}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<header><h1>{name}</h1>\n"
        f'<p class="state">{escape(state)}.{note}</p></header>\n<main>\n'
        f"{''.join(sections)}</main>\n"
        f"<footer>Written at {escape(report.written)}. {METRICS}, in the folder of this page, has "
        "all figures.</footer>\n</body>\n</html>\n"
    )


def escape(words: str) -> str:
    """Return a text for HTML, with control characters and lone surrogates made visible."""
    valid = words.encode(errors="backslashreplace").decode()
    pictures = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
    return html.escape(valid.replace("\r\n", "\n").translate(pictures))


def _shorten(words: str) -> str:
    return words if len(words) <= 60 else f"{words[:59]}…"


def _render_section(heading: str, contents: str) -> str:
    """Return a section, or nothing if it has no contents."""
    return f"<section><h2>{escape(heading)}</h2>\n{contents}</section>\n" if contents else ""


def _render_problems(problems: Iterable[str], trace: str) -> str:
    items = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
    if not items:
        return ""
    details = ""
    if trace:
        details = f"<details><summary>Traceback</summary><pre>{escape(trace)}</pre></details>"
    return f'<section class="problems"><h2>Problems</h2><ul>{items}</ul>{details}</section>\n'


def _render_facts(facts: Mapping[str, str]) -> str:
    return "\n".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts.items()
    )


def _render_sample(sample: Sample) -> str:
    prompt = f"<b>{escape(sample.prompt)}</b>" if sample.prompt else ""
    return f"<pre>{prompt}{escape(sample.text)}</pre>\n"


def _render_table(rows: Mapping[str, str]) -> str:
    cells = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in rows.items()
    )
    return f"<table>{cells}</table>" if cells else ""


def _render_sessions(sessions: Sequence[Session]) -> str:
    """Return a table of the sessions, if the run was resumed."""
    if len(sessions) < 2:
        return ""
    rows = []
    for session in sessions:
        steps = f"{session.first_step:,} to {session.last_step:,}"
        if session.last_step < session.first_step:
            steps = "none"
        # On a narrow screen a date may break before its time, but not inside.
        words = [f'<span class="whole">{escape(word)}</span>' for word in session.started.split()]
        cells = [escape(cell) for cell in (format_duration(session.seconds), steps, session.state)]
        rows.append("".join(f"<td>{cell}</td>" for cell in (" ".join(words), *cells)))
    head = "".join(
        f'<th scope="col">{name}</th>' for name in ("started", "duration", "steps", "state")
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _render_settings(settings: Sequence[Setting], noun: str) -> str:
    """Return the settings that are not the default as a table, and the others folded."""
    if not settings:
        return ""
    chosen = [setting for setting in settings if not setting.is_default]
    others = {setting.name: setting.value for setting in settings if setting.is_default}
    table = f"<p>All {noun} have their defaults.</p>"
    if chosen:
        head = "".join(f'<th scope="col">{name}</th>' for name in ("name", "value", "default"))
        rows = "".join(map(_render_setting, chosen))
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    if not others:
        return table
    label = f"{len(others)} {noun} with their defaults"
    return f"{table}<details><summary>{label}</summary>{_render_table(others)}</details>"


def _render_setting(setting: Setting) -> str:
    default = "" if setting.default is None else setting.default
    return (
        f'<tr><th scope="row">{escape(setting.name)}</th><td>{escape(setting.value)}</td>'
        f"<td>{escape(default)}</td></tr>"
    )


# --- memory ---------------------------------------------------------------------------------------

_BAR_WIDTH = 1000
_BAR_HEIGHT = 18


def _render_tiers(
    tiers: Mapping[str, Mapping[str, int]] | None, capacity: Mapping[str, float | None]
) -> str:
    """Return a bar and a table of each tier that is used, largest kind of bytes first."""
    if tiers is None:
        return ""
    figures = []
    for tier, kinds in tiers.items():
        used = {kind: num_bytes for kind, num_bytes in kinds.items() if num_bytes}
        if used:
            largest_first = dict(sorted(used.items(), key=lambda pair: -pair[1]))
            figures.append(_render_tier(tier, largest_first, capacity.get(tier)))
    return f'<div class="charts">{"".join(figures)}</div>'


def _render_tier(tier: str, kinds: Mapping[str, int], capacity: float | None) -> str:
    total = sum(kinds.values())
    words = f"{tier}: {format_bytes(total)}"
    if capacity:
        words += f" of {format_bytes(capacity)} ({_format_share(total / capacity)})"
    rows = ""
    for kind, num_bytes in kinds.items():
        cell = f'<td class="number">{format_bytes(num_bytes)}</td>'
        rows += f'<tr><th scope="row">{escape(kind)}</th>{cell}</tr>'
    return (
        f'<figure id="bytes-{escape(tier)}"><figcaption>{escape(words)}</figcaption>'
        f"{_draw_bar(words, kinds, capacity)}<table>{rows}</table></figure>\n"
    )


def _format_share(share: float) -> str:
    percent = 100 * share
    return "less than 0.01 %" if percent < 0.01 else f"{percent:.3g} %"


def _draw_bar(label: str, kinds: Mapping[str, int], capacity: float | None) -> str:
    """Return a bar whose length is the tier's capacity, or the bytes used if they are more."""
    total = sum(kinds.values())
    scale = _BAR_WIDTH / max(total, capacity or 0)
    room = element("rect", width=_BAR_WIDTH, height=_BAR_HEIGHT, class_="room")
    body = [room]
    x = 0.0
    for kind, num_bytes in kinds.items():
        width = num_bytes * scale
        title = element("title", escape(f"{kind} {format_bytes(num_bytes)}"))
        body.append(element("rect", title, x=x, width=width, height=_BAR_HEIGHT, class_="stripe"))
        x += width
    if capacity:
        place = min(capacity * scale, _BAR_WIDTH - 2.0)
        body.append(element("path", d=f"M{place:.6g} 0v{_BAR_HEIGHT}", class_="capacity"))
    return element(
        "svg",
        *body,
        viewBox=f"0 0 {_BAR_WIDTH} {_BAR_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
        class_="bar",
    )
