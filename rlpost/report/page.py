"""Writing the page: the text is laid out here, curves and samples by the scripts."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import statistics
from collections.abc import Iterator, Mapping
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from rlpost.report import curves, samples
from rlpost.report.read import Run, number, read_run

EVENTS = 40  # of errors.jsonl, listed one by one
VERDICTS = {  # word -> (class, sign), so that colour is never the only carrier
    "reproduced": ("good", "✓"),
    "not reproduced": ("bad", "✗"),
    "inconclusive": ("open", "?"),
    "not testable small": ("open", "–"),
}


def write_page(run_folder: str | Path, path: str | Path | None = None) -> Path:
    """Write the page of a run, and return where it lies.

    Args:
        run_folder: a run's folder, finished or not; see `rlpost.report` for its files.
        path: where to write; default `report.html` in the folder.

    Returns:
        The path of the page: one file, some MB at most, that needs no network.

    Raises:
        FileNotFoundError: if the folder does not exist.
    """
    run = read_run(run_folder)
    path = Path(path) if path is not None else run.folder / "report.html"
    text = render(run)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8", errors="replace")
    os.replace(partial, path)
    return path


def render(run: Run) -> str:
    """The page as text."""
    notes = list(run.notes)
    data = {
        "panels": curves.panels(run.metrics, notes),
        **samples.choose(run.folder / "samples.jsonl", notes),
    }
    name = run.folder.resolve().name
    style = _asset("page.css")
    script = _asset("curves.js") + _asset("samples.js")
    # "</script>" inside a string would end the element: no < is left in the data.
    content = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return Template(_asset("page.html")).substitute(
        title=escape(name),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        data=content,
        facts=_facts(run),
        headline=_headline(run),
        notes=_notes(run, notes),
        claims=_claims(run.claims),
        settings=_settings("Config", run.config) + _settings("Choices", run.choices),
    )


def headline(metrics: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any] | None:
    """What a run is judged by: the first and last of its main evaluation.

    Returns:
        {name, before, after, first, last, baselines: {name: value}} with `first` and
        `last` the steps; from the training reward where nothing was evaluated; None
        where neither was measured.
    """
    records = metrics.get("eval", [])
    names = sorted({k for r in records for k in r if k.startswith("eval/")})
    scores = [n for n in names if not n.startswith(curves.BASELINE)]
    baselines = {}
    for name in set(names) - set(scores):
        known = _known(records, name)
        if known:
            baselines[curves.baseline_name(name)] = known[-1][1]
    preferred = ("eval/pass@1", "eval/accuracy", "eval/correct", "eval/reward")
    found = [n for n in (*preferred, *scores) if _known(records, n)]
    name = found[0] if found else "reward/mean"
    known = _known(records if found else metrics.get("train", []), name)
    if not known:
        return None
    (first, before), (last, after) = known[0], known[-1]
    return {
        "name": name.removeprefix("eval/") if found else "mean training reward",
        "before": before,
        "after": after,
        "first": first,
        "last": last,
        "baselines": dict(sorted(baselines.items(), key=lambda item: item[1])),
    }


def result_line(folder: str | os.PathLike[str]) -> str:
    """The headline of a run folder in one line, for a terminal; "" without a result."""
    line = headline(read_run(Path(folder)).metrics)
    if line is None:
        return ""
    beside = ", ".join(f"{k} {v:.3f}" for k, v in line["baselines"].items())
    return (
        f"{line['name']}: {line['before']:.3f} before, {line['after']:.3f} after "
        f"{line['last'] - line['first']} updates" + (f" ({beside})" if beside else "")
    )


def _headline(run: Run) -> str:
    line = headline(run.metrics)
    if line is None:
        return '<p class="quiet">No result yet: nothing was evaluated.</p>'
    after, change = _short(line["after"]), line["after"] - line["before"]
    parts = [f'<p class="result"><span class="what">{escape(line["name"])}</span> ']
    if line["first"] == line["last"]:
        parts.append(f"<b>{after}</b> at step {line['last']}</p>")
    else:
        parts.append(
            f'<span class="before">{_short(line["before"])}</span> '
            f'<span class="arrow" aria-label="to">→</span> <b>{after}</b> '
            f'<span class="change">{"+" * (change > 0)}{_short(change)} from step '
            f"{line['first']} to {line['last']}</span></p>"
        )
    if line["baselines"]:
        beside = ", ".join(
            f"{escape(k)} <b>{_short(v)}</b>" for k, v in line["baselines"].items()
        )
        parts.append(f'<p class="beside">Beside it: {beside}.</p>')
    if run.claims:
        verdicts = [str(c.get("verdict", "")).lower() for c in run.claims]
        good = verdicts.count("reproduced")
        parts.append(
            f'<p class="beside"><a href="#claims">Claims</a>: '
            f"<b>{good}</b> of {len(verdicts)} reproduced.</p>"
        )
    return "".join(parts)


def _facts(run: Run) -> str:
    facts: list[tuple[str, str]] = []
    train = run.metrics.get("train", [])
    steps = [r["step"] for records in run.metrics.values() for r in records]
    if steps:
        planned = run.config.get("steps")
        of = f" of {planned:,}" if isinstance(planned, int) else ""
        facts.append(("step", f"{max(steps):,}{of}"))
    times = [t for records in run.metrics.values() for _, t in _known(records, "time")]
    if times:
        facts.append(("time", _duration(max(times))))
    speeds = [y for _, y in _known(train, "speed/tokens_per_s")]
    if speeds:
        facts.append(("tokens a second", f"{statistics.median(speeds):,.0f}"))
    for name in ("commit", "seed"):
        value = run.choices.get(name, run.config.get(name))
        if isinstance(value, str | int):
            shown = str(value)
            facts.append((name, shown[:10] if name == "commit" else shown))
    objective = run.choices.get("objective")
    text = "".join(
        f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts
    )
    line = ""
    if isinstance(objective, str):
        line = f'<p class="objective"><code>{escape(objective)}</code></p>'
    return f"{line}<dl>{text}</dl>" if text else line


def _notes(run: Run, notes: list[str]) -> str:
    if not notes and not run.errors:
        return ""
    items = [f"<li>{escape(note)}</li>" for note in notes]
    kinds: dict[str, int] = {}
    for error in run.errors:
        kind = str(error.get("kind", "event")).replace("_", " ")
        kinds[kind] = kinds.get(kind, 0) + 1
    counted = [f"<li><b>{n:,} × {escape(k)}</b></li>" for k, n in kinds.items()]
    rows = []
    for error in run.errors[:EVENTS]:
        told = error.get("message") or {
            k: v for k, v in error.items() if k not in ("step", "kind", "time")
        }
        told = told if isinstance(told, str) else json.dumps(told)
        rows.append(
            f"<tr><td class=n>{escape(str(error.get('step', '')))}</td>"
            f"<td>{escape(str(error.get('kind', '')))}</td>"
            f"<td class=told>{escape(told[:500])}</td></tr>"
        )
    more = len(run.errors) - len(rows)
    if more > 0:
        rows.append(f"<tr><td></td><td></td><td>and {more:,} more</td></tr>")
    table = ""
    if rows:
        table = (
            "<details><summary>The events one by one</summary><div class=wide><table>"
            "<tr><th class=n>step</th><th>kind</th><th>what happened</th></tr>"
            f"{''.join(rows)}</table></div></details>"
        )
    loud = " loud" if run.errors else ""
    return (
        f'<section class="notes{loud}" id="notes"><h2>Worth knowing</h2>'
        f"<ul>{''.join(counted + items)}</ul>{table}</section>"
    )


def _claims(claims: list[dict[str, Any]]) -> str:
    if not claims:
        return ""
    rows = []
    for claim in claims:
        verdict = str(claim.get("verdict", "")).lower()
        look, sign = VERDICTS.get(verdict, ("open", "·"))
        chip = f'<span class="chip {look}">{sign} {escape(verdict) or "open"}</span>'
        interval = claim.get("interval")
        if isinstance(interval, list) and len(interval) == 2:
            interval = f"{_value(interval[0])} to {_value(interval[1])}"
        cells = {
            "claim": _value(claim.get("claim")),
            "measured": _value(claim.get("measure")),
            "expected": _value(claim.get("expected")),
            "each seed": _value(claim.get("values")),
            "interval": _value(interval),
            "verdict": chip,
        }
        row = (f'<td data-name="{name}">{text}</td>' for name, text in cells.items())
        rows.append(f"<tr>{''.join(row)}</tr>")
    head = "".join(f"<th>{name}</th>" for name in cells)
    return (
        '<section id="claims"><h2>Claims</h2><div class=wide><table><thead><tr>'
        f"{head}</tr></thead>{''.join(rows)}</table></div></section>"
    )


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value))
    if isinstance(value, dict):
        return ", ".join(f"{escape(str(k))} {_value(v)}" for k, v in value.items())
    if isinstance(value, float):
        return f"{value:.4g}".replace("-", "−")
    return escape("–" if value is None else str(value))


def _settings(title: str, values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>"
        for key, value in _flat(values)
    )
    if not rows:
        return ""
    return (
        f"<details><summary>{title}</summary><div class=wide>"
        f'<table class="settings">{rows}</table></div></details>'
    )


def _flat(value: Any, at: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from _flat(below, f"{at}.{key}" if at else str(key))
    elif at:
        yield at, value if isinstance(value, str) else json.dumps(value)


def _known(records: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """(step, value) where it was measured and finite."""
    return [(r["step"], float(r[name])) for r in records if _is(r.get(name))]


def _is(value: Any) -> bool:
    value = number(value)
    return value is not None and abs(value) < float("inf")


def _short(value: float) -> str:
    """Three decimals for shares and the like, three digits for all else."""
    text = f"{value:.3f}" if abs(value) < 10 else f"{value:,.4g}"
    return text.replace("-", "−")


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"


def _asset(name: str) -> str:
    return resources.files("rlpost.report").joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    """Of an inline script or style, by which the page's policy allows it alone."""
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256-" + base64.b64encode(digest).decode()
