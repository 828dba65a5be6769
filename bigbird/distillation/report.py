"""A self-contained HTML report of distillation runs: curves, results, speed and memory.

write_report("runs/a/report.html", ["runs/a"])          one run
write_report("compare.html", ["runs/a", "runs/b"])      several, laid over each other
"""

from __future__ import annotations

import dataclasses
import html
import io
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from bigbird.core.callbacks import ScalarLog, write_atomically
from bigbird.core.training import read_configuration
from bigbird.distillation.monitor import LOG_NAME

SUMMARY = "summary.json"
_MIB = 2**20
# Title, log, column, unit.
CURVES = (
    ("Training loss", "train", "loss", "nats a token"),
    ("Held-out divergence from the teacher", "validation", "kl", "nats a token"),
    ("Held-out agreement on the likeliest word", "validation", "argmax_agreement", "share"),
    ("Teacher's mass on the kept words", "train", "kept_mass", "share"),
    ("Speed", LOG_NAME, "tokens_per_second", "tokens a second"),
    ("Peak memory", LOG_NAME, "peak_bytes", "MiB"),
)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .25em .8em; text-align: left }
tr:nth-child(even) { background: #f4f4f4 } td.number { text-align: right }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 1em }
.curves svg { width: 100%; height: auto }
"""


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run left in its directory.

    Attributes:
      name: of the directory, or its path where runs share a name.
      settings: what decided the result.
      summary: what `run_distillation` found before it trained: parameters, planned bytes.
      logs: rows of `train.csv`, `validation.csv` and `speed.csv` by name.
    """

    name: str
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    logs: Mapping[str, Sequence[Mapping[str, float]]]

    @classmethod
    def read(cls, directory: str) -> Run:
        """Reads a run.

        Raises:
          ValueError: where the directory holds none.
        """
        settings = read_configuration(directory)
        if settings is None:
            raise ValueError(f"{directory} holds no run: name the --output_dir of one.")
        path = os.path.join(directory, SUMMARY)
        summary = {}
        if os.path.exists(path):
            with open(path) as file:
                summary = json.load(file)
        names = ("train", "validation", LOG_NAME)
        logs = {name: ScalarLog(directory, name).rows() for name in names}
        return cls(os.path.basename(os.path.normpath(directory)), settings, summary, logs)

    def curve(self, log: str, column: str) -> list[tuple[int, float]]:
        """Returns (step, value) of the rows that have the column; bytes as MiB."""
        unit = _MIB if column.endswith("_bytes") else 1
        return [(int(row["step"]), row[column] / unit) for row in self.logs[log] if column in row]

    def results(self) -> dict[str, str]:
        """Returns what the table of results says of the run."""
        found = {"mode": str(self.settings.get("mode", ""))}
        if "parameters" in self.summary:
            found["parameters"] = f"{self.summary['parameters']:,}"
        for name, log, column in (
            ("last loss", "train", "loss"),
            ("held-out divergence", "validation", "kl"),
            ("agreement", "validation", "argmax_agreement"),
            ("kept mass", "train", "kept_mass"),
        ):
            if curve := self.curve(log, column):
                found[name] = f"{curve[-1][1]:.4f}"
        for name, column in (("steps a second", "steps_per_second"),):
            if curve := self.curve(LOG_NAME, column):
                found[name] = f"{_median([value for _, value in curve]):.2f}"
        if curve := self.curve(LOG_NAME, "tokens_per_second"):
            found["tokens a second"] = f"{_median([value for _, value in curve]):,.0f}"
        if self.summary.get("planned_bytes"):
            found["planned MiB of a step"] = f"{self.summary['planned_bytes'] / _MIB:,.0f}"
        if curve := self.curve(LOG_NAME, "peak_bytes"):
            found["peak MiB"] = f"{max(value for _, value in curve):,.0f}"
        return found


def _median(values):
    return sorted(values)[len(values) // 2]


def write_report(path: str, directories: Sequence[str]) -> None:
    """Writes the report of one run, or of several laid over each other, as one HTML file.

    Raises:
      ValueError: where a directory holds no run.
    """
    directories = list(dict.fromkeys(map(os.path.normpath, directories)))
    runs = [Run.read(directory) for directory in directories]
    if len({run.name for run in runs}) < len(runs):
        runs = [dataclasses.replace(run, name=d) for run, d in zip(runs, directories, strict=True)]
    write_atomically(path, render(runs))


def render(runs: Sequence[Run]) -> str:
    """Returns the report as HTML that needs no other file."""
    title = "Distillation: " + ", ".join(run.name for run in runs)
    figures = [_figure(runs, *curve) for curve in CURVES]
    results = {run.name: run.results() for run in runs}
    columns = list(dict.fromkeys(name for row in results.values() for name in row))
    body = [
        f"<h1>{html.escape(title)}</h1>",
        _table("run", results, columns),
        '<div class="curves">' + "".join(figure for figure in figures if figure) + "</div>",
        "<h2>Settings</h2>",
        *_settings(runs),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>"
        + "\n".join(body)
        + "</body></html>\n"
    )


def _settings(runs):
    settings = {run.name: dict(_flat(run.settings)) for run in runs}
    names = list(dict.fromkeys(name for found in settings.values() for name in found))
    rows = {
        name: {run: found[name] for run, found in settings.items() if name in found}
        for name in names
    }
    if len(runs) > 1:
        differing = {
            name: row
            for name, row in rows.items()
            if len(row) < len(runs) or len(set(row.values())) > 1
        }
        yield "<h3>Where the runs differ</h3>"
        yield _table("setting", differing, list(settings)) if differing else "<p>Nowhere.</p>"
    table = _table("setting", rows, list(settings))
    yield f"<details><summary>All settings</summary>{table}</details>"


def _flat(settings, prefix=""):
    """(name, JSON) of each setting; those of a nested one are named with a dot."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value)


def _table(corner, rows, columns):
    """An HTML table of dicts by name."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in [corner, *columns])
    lines = [f"<tr>{head}</tr>"]
    for name, row in rows.items():
        cells = "".join(f'<td class="number">{html.escape(row.get(c, ""))}</td>' for c in columns)
        lines.append(f"<tr><td>{html.escape(name)}</td>{cells}</tr>")
    return "<table>" + "\n".join(lines) + "</table>"


def _figure(runs, title, log, column, unit):
    """One chart with a line a run, as SVG; None where no run has the numbers."""
    curves = {run.name: run.curve(log, column) for run in runs}
    if not any(curves.values()):
        return None
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        if points:
            axes.plot(*zip(*points, strict=True), label=name, linewidth=1.5)
    axes.set(xlabel="step", ylabel=unit, title=title)
    axes.grid(alpha=0.3)
    if len(runs) > 1:
        axes.legend()
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return f"<figure>{svg[svg.index('<svg') :]}</figure>"
