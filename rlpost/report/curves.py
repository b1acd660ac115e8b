"""From records to the panels of a page: which curves go together, and thinning."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from rlpost.report.read import number

POINTS = 800  # of a series: more than a screen resolves
SMOOTH = 60  # points, above which a curve is drawn smoothed over its faint values
SERIES = 8  # of a panel: more than a reader tells apart
BASELINE = "eval/baseline"

# (title, unit, names), in the order of the page; what no pattern takes is gathered by
# the part before the slash and shown below, folded. "bands" are stacked.
PANELS = (
    ("Held-out evaluation", "", r"eval/(pass@\d+|accuracy|correct|score)"),
    ("Training reward", "", r"reward(/.*)?"),
    ("Loss", "", r"loss(/.*)?"),
    ("KL", "nats a token", r"kl([_/].*)?"),
    ("Ratio", "", r"ratio([_/].*)?"),
    ("Clipped share", "", r"clip_fraction"),
    ("Entropy", "nats a token", r"entropy"),
    ("Kept share", "of tokens", r"kept"),
    ("Rows with signal", "share", r"signal"),
    ("Truncated share", "", r"(response/)?truncated"),
    ("Response length", "tokens", r"response/tokens"),
    ("Time by phase", "s a step", r"time/(?!step$).*"),  # step holds the others
    ("Throughput", "tokens a second", r"(speed/)?tokens_per_s(econd)?"),
    ("Model FLOP utilisation", "", r"(speed/)?mfu"),
)
BANDS = "Time by phase"
TOGETHER = {"Held-out evaluation", "Training reward", BANDS}  # whatever their scales
SCALE = 20  # a series this much smaller than another would be a flat line beside it
NOT_CURVES = {"step", "time", "kind"}
Row = tuple[int, float | None, float | None]  # step, time, value


def panels(
    metrics: dict[str, list[dict[str, Any]]], notes: list[str]
) -> list[dict[str, Any]]:
    """The panels of a run, as JSON-able mappings.

    Args:
        metrics: records by kind, in order of step.
        notes: gains a sentence for what was thinned, left out or not finite.

    Returns:
        A list of {title, unit, bands, more, series, guides}: series are {name, label,
        x, t, y, smooth} with steps, seconds, values (None where not measured) and, for
        many points, their running mean; guides are {name, y}.
    """
    series, odd, thinned = _series(metrics)
    made: dict[str, dict[str, Any]] = {}
    for title, unit, pattern in PANELS:
        names = [n for n in series if re.fullmatch(pattern, n)]
        if title == "Loss" and len(names) == 2:
            names = names[:1]  # the sum of one term is that term
        _add(made, title, unit, False, {n: series.pop(n) for n in names})
    baselines = [n for n in series if n.startswith(BASELINE)]
    guides = [{"name": baseline_name(n), "y": _last(series.pop(n))} for n in baselines]
    if PANELS[0][0] not in made:  # an evaluation by names of its own
        named = [n for n in series if n.startswith("eval/")]
        first, unit, _ = PANELS[0]
        _add(made, first, unit, False, {n: series.pop(n) for n in named})
        made = {title: made[title] for title in sorted(made, key=lambda t: t != first)}
    for name in list(series):
        title = name.split("/")[0].replace("_", " ").capitalize()
        _add(made, title, "", True, {name: series.pop(name)})
    if PANELS[0][0] in made:
        made[PANELS[0][0]]["guides"] = [g for g in guides if g["y"] is not None]
    for panel in made.values():
        if len(panel["series"]) == 1 and not panel["more"]:
            panel["series"][0]["label"] = ""  # the title says it
        if len(panel["series"]) > SERIES:
            left = [s["name"] for s in panel["series"][SERIES:]]
            notes.append(f"{panel['title']} is drawn without {', '.join(left)}.")
            panel["series"] = panel["series"][:SERIES]
    shown = [part for panel in made.values() for part in _by_scale(panel)]
    if thinned:
        notes.append(
            f"Long curves are thinned to {POINTS} points: the lowest and the highest "
            "value of every stretch (times by phase: running means)."
        )
    for name, steps in odd.items():
        where = ", ".join(map(str, steps[:5])) + (" ..." if len(steps) > 5 else "")
        count = "step" if len(steps) == 1 else f"{len(steps)} steps:"
        notes.append(f"{name} was not finite at {count} {where}.")
    return shown


def baseline_name(name: str) -> str:
    """ "eval/baseline_constant" to "constant"; the bare name to "baseline"."""
    rest = name.removeprefix(BASELINE).strip("_/").replace("_", " ")
    return rest or "baseline"


def _add(
    made: dict[str, dict], title: str, unit: str, more: bool, found: dict[str, dict]
) -> None:
    if found:
        new = {"title": title, "unit": unit, "bands": title == BANDS, "more": more}
        panel = made.setdefault(title, {**new, "series": [], "guides": []})
        for name, series in found.items():
            label = name.split("/", 1)[-1].replace("_", " ")
            panel["series"].append({"name": name, "label": label, **series})


def _by_scale(panel: dict[str, Any]) -> list[dict[str, Any]]:
    """The panel, or several of it, each with series of about one size."""
    if panel["title"] in TOGETHER:
        return [panel]
    sized = []
    for series in panel["series"]:
        size = max(abs(y) for y in series["y"] if y is not None)
        sized.append((size, series))
    sized.sort(key=lambda pair: pair[0], reverse=True)
    parts: list[tuple[float, list]] = []
    for size, series in sized:
        if parts and size * SCALE >= parts[-1][0]:
            parts[-1][1].append(series)
        else:
            parts.append((size, [series]))
    return [{**panel, "series": series} for _, series in parts]


def _series(
    metrics: dict[str, list[dict[str, Any]]],
) -> tuple[dict[str, dict[str, list]], dict[str, list[int]], bool]:
    """Series by name; steps at which a value was not finite; whether any is thinned."""
    points: dict[str, list[Row]] = {}
    odd: dict[str, list[int]] = {}
    for kind, records in metrics.items():
        names = sorted({k for r in records for k in r} - NOT_CURVES)
        names.sort(key=lambda name: not name.endswith("/mean"))
        for name in names:
            rows = []
            for record in records:
                y = number(record.get(name))
                if y is not None and not math.isfinite(y):
                    odd.setdefault(name, []).append(record["step"])
                    y = None
                rows.append((record["step"], number(record.get("time")), y))
            if any(y is not None for _, _, y in rows):
                own = kind == "train" or name.startswith(f"{kind}/")
                points[name if own else f"{kind}: {name}"] = rows
    thinned = any(len(rows) > POINTS for rows in points.values())
    return {name: _curve(name, rows) for name, rows in points.items()}, odd, thinned


def _curve(name: str, rows: list[Row]) -> dict[str, Any]:
    if name.startswith("eval/"):  # measured now and then: a line from one to the next
        rows = [row for row in rows if row[2] is not None]
    values = [row[2] for row in rows]
    smooth = running_mean(values) if len(rows) > SMOOTH else None
    if smooth and name.startswith("time/"):
        # They are stacked, and need the same steps.
        kept, values = list(range(0, len(rows), -(-len(rows) // POINTS))), smooth
    else:
        kept = thin(values, POINTS)
    return {
        "x": [rows[i][0] for i in kept],
        "t": [_rounded(rows[i][1], 6) for i in kept],
        "y": [_rounded(values[i]) for i in kept],
        "smooth": [_rounded(smooth[i]) for i in kept] if smooth else None,
    }


def thin(y: Sequence[float | None], points: int) -> list[int]:
    """Indices of at most `points` values: the lowest and highest of each stretch.

    The first and the last stay; a stretch without a value gives one index.
    """
    if len(y) <= points:
        return list(range(len(y)))
    inner, pieces = len(y) - 2, (points - 2) // 2
    kept = [0]
    for i in range(pieces):
        stretch = range(1 + i * inner // pieces, 1 + (i + 1) * inner // pieces)
        known = [(value, j) for j in stretch if (value := y[j]) is not None]
        if known:
            kept += sorted({min(known)[1], max(known)[1]})
        else:
            kept += stretch[:1]
    return [*kept, len(y) - 1]


def running_mean(y: Sequence[float | None]) -> list[float | None]:
    """The mean of each value and its neighbours, a fiftieth of the series each way.

    Fewer at the ends; what was not measured stays None and does not count.
    """
    reach = max(1, len(y) // 50)
    sums, counts = [0.0], [0]
    for value in y:
        sums.append(sums[-1] + (value or 0.0))
        counts.append(counts[-1] + (value is not None))
    means: list[float | None] = []
    for i, value in enumerate(y):
        low, high = max(0, i - reach), min(len(y), i + reach + 1)
        count = counts[high] - counts[low]
        means.append(None if value is None else (sums[high] - sums[low]) / count)
    return means


def _rounded(value: float | None, digits: int = 5) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def _last(series: dict[str, list]) -> float | None:
    known = [y for y in series["y"] if y is not None]
    return known[-1] if known else None
