"""The one benchmark harness: time, peak memory and planned memory of a step, as CSV rows and PNG.

A benchmark is a module `benchmarks.bench_<subject>` that makes `Row`s and hands them to
`write_csv` and `draw`. Variants that are compared are measured in one run, turn by turn, so that a
machine that slows down slows all of them. Peak memory is taken in a fresh process, because a
process never gives back its peak:

    # in the benchmark                                   # in the same module, run as a child
    peak_rss_in_fresh_process(__spec__.name, argv)       report_peak_rss(step)
"""

from __future__ import annotations

import csv
import dataclasses
import os
import pathlib
import platform
import re
import subprocess
import sys
import time

import numpy as np
import tensorflow as tf

RESULTS = pathlib.Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Timing:
    """Percentiles of the seconds that one call takes."""

    p20: float
    p50: float
    p80: float


@dataclasses.dataclass
class Row:
    """One measured variant: a line of the CSV. None where a quantity was not measured.

    Attributes:
      variant: What is compared, such as a policy or an implementation.
      mode: "eager", "graph" or "xla".
      shape: Sizes as text, such as "B=2 L=4096".
      dtype: Compute dtype.
      timing: Seconds per step.
      peak_rss_bytes: Peak resident memory of a fresh process above its idle level.
      planned_bytes: Total of XLA's buffer assignment.
      loss: What the step computed, where that shows that it ran.
    """

    variant: str
    mode: str
    shape: str
    dtype: str
    timing: Timing | None = None
    peak_rss_bytes: int | None = None
    planned_bytes: int | None = None
    loss: float | None = None

    def as_record(self):
        """Returns the CSV fields: milliseconds, MiB, and where and with what it was measured."""
        seconds = dataclasses.asdict(self.timing) if self.timing else {}
        return {
            "variant": self.variant,
            "mode": self.mode,
            "shape": self.shape,
            "dtype": self.dtype,
            **{f"{p}_ms": _scaled(seconds.get(p), 1e-3) for p in ("p20", "p50", "p80")},
            "peak_rss_mib": _scaled(self.peak_rss_bytes, 2**20),
            "planned_mib": _scaled(self.planned_bytes, 2**20),
            **({} if self.loss is None else {"loss": self.loss}),
            "device": device(),
            "tensorflow": tf.__version__,
            "commit": commit(),
        }


def _scaled(value, unit):
    return "" if value is None else round(value / unit, 1)


def measure(fn, repeats=10, warmup=1):
    """Returns the `Timing` of calling `fn`, which must return tensors."""
    return measure_in_turn({"": fn}, repeats, warmup)[""]


def measure_in_turn(fns, repeats=10, warmup=1):
    """Times functions turn by turn, so that drift of the machine meets all of them alike.

    Args:
      fns: Dict of name -> function that returns (nested) tensors.
      repeats: Timed calls of each.
      warmup: Calls of each before the first timed one; they trace and compile.

    Returns:
      Dict of name -> `Timing`.
    """
    for fn in fns.values():
        for _ in range(warmup):
            _wait_for(fn())
    seconds = {name: [] for name in fns}
    for _ in range(repeats):
        for name, fn in fns.items():
            start = time.perf_counter()
            _wait_for(fn())
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(*np.percentile(s, [20, 50, 80])) for name, s in seconds.items()}


def _wait_for(outputs):
    for tensor in tf.nest.flatten(outputs, expand_composites=True):
        tensor.numpy()


def peak_rss_in_fresh_process(module, argv, environment=()):
    """Runs `python -m module *argv`, which calls `report_peak_rss`; returns the bytes it reports.

    Args:
      environment: Dict of variables beside those of this process.

    Raises:
      RuntimeError: If the process fails or reports nothing; the message ends with its stderr.
    """
    child = subprocess.run(
        [sys.executable, "-m", module, *argv],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **dict(environment)},
    )
    report = re.search(rf"^{_REPORT}=(\d+)$", child.stdout, re.MULTILINE)
    if child.returncode != 0 or report is None:
        raise RuntimeError(
            f"{module} {' '.join(argv)} should have called report_peak_rss; it ended with "
            f"code {child.returncode}:\n{child.stderr[-2000:]}"
        )
    return int(report.group(1))


def report_peak_rss(step, calls=2):
    """Calls `step` and prints the peak of resident memory above that before the first call.

    Linux only. The peak includes the tracing of a `tf.function` but, with `jit_compile`, also the
    memory of the compiler.
    """
    idle = status_bytes("VmRSS")
    for _ in range(calls):
        _wait_for(step())
    print(f"{_REPORT}={status_bytes('VmHWM') - idle}", flush=True)


_REPORT = "peak_rss_above_idle_bytes"


def status_bytes(field):
    """Returns a size in `/proc/self/status`, such as VmRSS or VmHWM, its peak; Linux only."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE).group(1)) * 1024


def device():
    """Returns what the benchmark ran on."""
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        return tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU")
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def commit():
    """Returns the short hash of the checkout, with "+" behind it if files have changed since."""
    root = pathlib.Path(__file__).parent
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
    result = subprocess.run(describe, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def write_csv(path, rows):
    """Writes `Row`s; the file appears under its name only when it is whole."""
    records = [row.as_record() for row in rows]
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(records[0]))
        writer.writeheader()
        writer.writerows(records)
    partial.replace(path)


def draw(path, series, xlabel, ylabel, title):
    """Draws one line per entry of `series`, a dict of name -> list of (x, y), on log axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, points in series.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel, title=title)
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
