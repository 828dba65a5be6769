"""Benchmark of checkpointing policies: planned bytes, peak memory and time of a training step.

    python -m benchmarks.bench_recompute                 # everything, about an hour
    python -m benchmarks.bench_recompute --parts=plan    # planned bytes only, on any machine
    python -m benchmarks.bench_recompute --parts=long    # one step on 65,536 tokens, really run

The step is `memory.training_step`: forward and backward pass of an encoder, all gradients returned.
"""

from __future__ import annotations

import argparse
import re
import time

import tensorflow as tf

from benchmarks import harness
from bigbird.core.config import BigBirdConfig
from bigbird.core.memory import GIB, POLICIES_BY_TIME, plan_training, training_step
from bigbird.core.modeling import BertModel

SIZES = {
    "base": {"num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 3072},
    "small": {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 1024},
}
MODES = {
    "eager": lambda step: step,
    "graph": tf.function,
    "xla": lambda step: tf.function(step, jit_compile=True),
}

# (size, batch, length) of each part; for TIMED also the mode, the policies and the repeats, since a
# step of the base model takes about a minute.
PLANNED = [
    ("small", 1, 4096),
    ("base", 2, 4096),
    *[("base", 1, length) for length in (2048, 8192, 32768)],
]
TIMED = [
    *[("small", 1, 4096, mode, POLICIES_BY_TIME, 7) for mode in MODES],
    ("base", 2, 4096, "xla", ("none", "full"), 3),
]
# glibc's allocator keeps freed memory apart for each thread, unless it has one arena.
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
RESIDENT = [
    ("small", 1, 4096, "eager", {}),
    ("small", 1, 4096, "graph", {}),
    ("small", 1, 4096, "graph", ONE_ARENA),
]


def config(size, length, policy):
    """Returns the config of a model of a named size."""
    sizes = SIZES[size]
    return BigBirdConfig(
        **sizes,
        num_attention_heads=sizes["hidden_size"] // 64,
        block_size=64,
        max_encoder_length=length,
        max_position_embeddings=max(length, 4096),
        gradient_checkpointing_policy=policy,
    )


def build_step(size, batch, length, policy, mode):
    """Returns a function without arguments that makes one step on random documents."""
    model = BertModel(config(size, length, policy))
    step = MODES[mode](training_step(model))
    ids = tf.random.stateless_uniform([batch, length], [0, 0], 1, model.config.vocab_size, tf.int32)
    return lambda: step(ids, tf.constant([0, 0]))


def row(size, batch, length, policy, mode, **measured):
    """Returns a CSV row."""
    shape = f"{size} B={batch} L={length}"
    return harness.Row(policy, mode, shape, "float32", **measured)


def planned_rows():
    """Plans every policy without running it."""
    for size, batch, length in PLANNED:
        for policy in POLICIES_BY_TIME:
            plan = plan_training(config(size, length, policy), batch).step
            yield row(size, batch, length, policy, "xla", planned_bytes=plan.total_bytes)


def timed_rows():
    """Times the policies turn by turn."""
    for size, batch, length, mode, policies, repeats in TIMED:
        steps = {p: build_step(size, batch, length, p, mode) for p in policies}
        for policy, timing in harness.measure_in_turn(steps, repeats).items():
            yield row(size, batch, length, policy, mode, timing=timing)


def resident_rows():
    """Measures peak memory, a fresh process each."""
    for size, batch, length, mode, environment in RESIDENT:
        for policy in POLICIES_BY_TIME:
            argv = ["--child", size, str(batch), str(length), policy, mode]
            peak = harness.peak_rss_in_fresh_process(
                "benchmarks.bench_recompute", argv, environment
            )
            label = " ".join([mode, *(f"{name}={value}" for name, value in environment.items())])
            yield row(size, batch, length, policy, label, peak_rss_bytes=peak)


def long_rows():
    """Makes one step of the base model on 65,536 tokens here; its time includes compilation."""
    size, batch, length, policy, mode = "base", 1, 65536, "full", "xla"
    step = build_step(size, batch, length, policy, mode)
    idle = harness.status_bytes("VmRSS")
    start = time.perf_counter()
    loss = float(step()[0])
    seconds = time.perf_counter() - start
    yield row(
        size,
        batch,
        length,
        policy,
        mode,
        timing=harness.Timing(seconds, seconds, seconds),
        peak_rss_bytes=harness.status_bytes("VmHWM") - idle,
        loss=loss,
    )


def main():
    """Runs the parts, or the step of one child process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="plan,resident,time")
    parser.add_argument("--child", nargs=5, metavar=("SIZE", "BATCH", "LENGTH", "POLICY", "MODE"))
    arguments = parser.parse_args()
    if arguments.child:
        size, batch, length, policy, mode = arguments.child
        harness.report_peak_rss(build_step(size, int(batch), int(length), policy, mode))
        return

    parts = {
        "plan": planned_rows,
        "resident": resident_rows,
        "time": timed_rows,
        "long": long_rows,
    }
    for part in arguments.parts.split(","):
        rows = []
        for measured in parts[part]():
            print(measured, flush=True)
            rows.append(measured)
        harness.write_csv(harness.RESULTS / f"recompute_{part}.csv", rows)
        if part == "plan":
            draw_plans(rows)


def draw_plans(rows):
    """Draws planned memory of the base model against length, a line per policy."""
    series = {policy: [] for policy in POLICIES_BY_TIME}
    for planned in rows:
        shape = re.fullmatch(r"base B=1 L=(\d+)", planned.shape)
        if shape:
            series[planned.variant].append((int(shape.group(1)), planned.planned_bytes / GIB))
    harness.draw(
        harness.RESULTS / "recompute_plan.png",
        series,
        xlabel="tokens in a document",
        ylabel="planned GiB",
        title="One training step of the base model, batch 1, by what is recomputed",
    )


if __name__ == "__main__":
    main()
