"""Memory and time of the distillation losses: dense, forward-chunked, fused.

    python -m benchmarks.bench_kl

writes `results/kl.csv` and `results/kl.png`. Memory is what XLA plans for loss and gradients, from
shapes alone, at the sizes of a 128,256-word head. Time and peak memory are measured at a size that
fits a small machine, in graph mode and under XLA, all variants in one run. Where PyTorch is
installed, its dense and its checkpointed chunked loss are timed too.
"""

import argparse
import importlib.util

import tensorflow as tf

from benchmarks import harness
from bigbird.core.memory import planned_memory
from bigbird.distillation.losses import topk_kl
from bigbird.distillation.targets import TopKTargets

GIB = 2**30
KEPT = 100
VARIANTS = {
    "dense": {"implementation": "dense"},
    "forward_chunked": {"implementation": "forward_chunked"},
    "fused recompute": {"implementation": "fused", "gradient": "recompute"},
    "fused one_pass": {"implementation": "fused", "gradient": "one_pass"},
}

PLANNED_WIDTH, PLANNED_VOCABULARY = 4096, 128256
PLANNED_TOKENS = [2**13, 2**14, 2**15, 2**16, 2**17, 2**18]
# 16-bit inputs, as small as the loss can be made.
BFLOAT16_BUDGETS = {2**15: int(3.5 * GIB), 2**18: int(5.35 * GIB)}
# Arithmetic of the paper's toy run (arXiv:2608.03796), in GiB by tokens.
PAPER_GIB = {
    "paper: dense": {2**15: 85.2},
    "paper: forward-chunked": {2**18: 134.2},
    "paper: fused": {2**15: 5.45, 2**18: 11.6},
}

TIMED_TOKENS, TIMED_WIDTH, TIMED_VOCABULARY = 8192, 512, 32000
CHUNK_TOKENS = 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each variant")
    parser.add_argument("--peak", nargs=2, metavar=("VARIANT", "MODE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        harness.report_peak_rss(timed_step(*arguments.peak))
        return
    planned = planned_rows()
    rows = planned + timed_rows(arguments.repeats) + torch_rows(arguments.repeats)
    harness.write_csv(harness.RESULTS / "kl.csv", rows)
    draw_memory(planned)
    print_ratios(rows)


def loss_and_gradients(hidden, kernel, targets, **options):
    """What a training step asks of the loss."""
    with tf.GradientTape() as tape:
        tape.watch([hidden, kernel])
        loss = topk_kl(hidden, kernel, targets, **options)
    return loss, tape.gradient(loss, [hidden, kernel])


def planned_rows():
    """XLA's plan of every variant, in float32 by tokens, and of the fused ones in bfloat16."""
    rows = [
        planned_row(variant, tokens, tf.float32, **options)
        for variant, options in VARIANTS.items()
        for tokens in PLANNED_TOKENS
    ]
    for tokens, budget in BFLOAT16_BUDGETS.items():
        for variant in ("fused recompute", "fused one_pass"):
            options = {"memory_budget_bytes": budget, **VARIANTS[variant]}
            rows.append(planned_row(variant, tokens, tf.bfloat16, **options))
    return rows


def planned_row(variant, tokens, dtype, **options):
    """XLA's plan of one variant, inputs included."""

    def step(hidden, kernel, ids, logits, log_z):
        targets = TopKTargets(ids, logits, log_z, PLANNED_VOCABULARY)
        return loss_and_gradients(hidden, kernel, targets, **options)

    plan = planned_memory(
        step,
        tf.TensorSpec([tokens, PLANNED_WIDTH], dtype),
        tf.TensorSpec([PLANNED_WIDTH, PLANNED_VOCABULARY], dtype),
        tf.TensorSpec([tokens, KEPT], tf.int32),
        tf.TensorSpec([tokens, KEPT], tf.float32),
        tf.TensorSpec([tokens], tf.float32),
    )
    print(
        f"{variant:16} {dtype.name:8} N={tokens:<7} {plan.total_bytes / GIB:8.2f} GiB", flush=True
    )
    return harness.Row(
        variant,
        "xla",
        shape_text(tokens, PLANNED_WIDTH, PLANNED_VOCABULARY),
        dtype.name,
        planned_bytes=plan.total_bytes,
    )


def shape_text(tokens, width, vocab_size):
    return f"N={tokens} D={width} V={vocab_size} K={KEPT}"


def timed_step(variant, mode):
    """A call of loss and gradients on fixed inputs."""
    hidden = tf.random.stateless_normal([TIMED_TOKENS, TIMED_WIDTH], seed=[0, 1])
    kernel = tf.random.stateless_normal([TIMED_WIDTH, TIMED_VOCABULARY], seed=[0, 2]) / 20
    targets = random_targets()

    @tf.function(jit_compile=mode == "xla")
    def step(hidden, kernel, targets):
        options = {"chunk_tokens": CHUNK_TOKENS, **VARIANTS[variant]}
        return loss_and_gradients(hidden, kernel, targets, **options)

    return lambda: step(hidden, kernel, targets)


def random_targets():
    """Distinct ids with the mass of a trained teacher's head: about 0.9."""
    first = tf.random.stateless_uniform([TIMED_TOKENS, 1], [0, 3], 0, TIMED_VOCABULARY, tf.int32)
    ids = (first + 317 * tf.range(KEPT)) % TIMED_VOCABULARY
    logits = tf.random.stateless_normal([TIMED_TOKENS, KEPT], seed=[0, 4]) * 2
    logits = tf.sort(logits, direction="DESCENDING")
    return TopKTargets(ids, logits, tf.reduce_logsumexp(logits, -1) + 0.1, TIMED_VOCABULARY)


def timed_rows(repeats):
    """Time, and peak memory in a fresh process, of every variant in graph mode and under XLA."""
    cases = [(variant, mode) for mode in ("graph", "xla") for variant in VARIANTS]
    timings = harness.measure_in_turn({case: timed_step(*case) for case in cases}, repeats)
    return [
        harness.Row(
            variant,
            mode,
            shape_text(TIMED_TOKENS, TIMED_WIDTH, TIMED_VOCABULARY),
            "float32",
            timing=timings[variant, mode],
            peak_rss_bytes=harness.peak_rss_in_fresh_process(
                "benchmarks.bench_kl", ["--peak", variant, mode]
            ),
        )
        for variant, mode in cases
    ]


def torch_rows(repeats):
    """PyTorch's dense and checkpointed chunked loss on the same inputs, where it is installed."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch
    from torch.utils.checkpoint import checkpoint

    hidden = torch.randn(TIMED_TOKENS, TIMED_WIDTH, requires_grad=True)
    kernel = (torch.randn(TIMED_WIDTH, TIMED_VOCABULARY) / 20).requires_grad_()
    targets = random_targets()
    ids = torch.tensor(targets.ids.numpy(), dtype=torch.int64)
    weights = torch.tensor(tf.nn.softmax(targets.logits).numpy())

    def loss_sum(hidden, ids, weights):
        log_student = torch.log_softmax(hidden @ kernel, -1).gather(-1, ids)
        return (weights * (weights.log() - log_student)).sum()

    def dense():
        return loss_sum(hidden, ids, weights)

    def chunked():
        parts = zip(*(x.split(CHUNK_TOKENS) for x in (hidden, ids, weights)), strict=True)
        return sum(checkpoint(loss_sum, *part, use_reentrant=False) for part in parts)

    def step(loss):
        gradients = torch.autograd.grad(loss() / TIMED_TOKENS, [hidden, kernel])
        return [tf.constant(float(gradient.sum())) for gradient in gradients]

    losses = {"torch dense": dense, "torch checkpointed": chunked}
    timings = harness.measure_in_turn(
        {name: lambda loss=loss: step(loss) for name, loss in losses.items()}, repeats
    )
    shape = shape_text(TIMED_TOKENS, TIMED_WIDTH, TIMED_VOCABULARY)
    return [
        harness.Row(name, f"torch {torch.__version__}", shape, "float32", timing=timing)
        for name, timing in timings.items()
    ]


def draw_memory(rows):
    """Planned memory against tokens, with the paper's figures."""
    series = {variant: [] for variant in VARIANTS}
    for row in rows:
        if row.dtype == "float32":
            tokens = int(row.shape.split()[0].removeprefix("N="))
            series[row.variant].append((tokens, row.planned_bytes / GIB))
    series |= {name: list(points.items()) for name, points in PAPER_GIB.items()}
    harness.draw(
        harness.RESULTS / "kl.png",
        series,
        xlabel="tokens",
        ylabel="GiB: inputs, loss and gradients",
        title=f"Distillation loss, D={PLANNED_WIDTH}, V={PLANNED_VOCABULARY}, K={KEPT}, float32",
    )


def print_ratios(rows):
    """Time and peak memory of every timed variant over those of `dense` in its mode."""
    timed = [row for row in rows if row.timing]
    dense = {row.mode: row for row in timed if row.variant == "dense"}
    for row in timed:
        base = dense.get(row.mode, dense["graph"])
        line = f"{row.variant:20} {row.mode:12} time {row.timing.p50:6.2f} s"
        line += f" = {row.timing.p50 / base.timing.p50:.2f} of dense"
        if row.peak_rss_bytes:
            line += f", peak {row.peak_rss_bytes / GIB:.2f} GiB"
            line += f" = 1/{base.peak_rss_bytes / row.peak_rss_bytes:.1f} of dense"
        print(line)


if __name__ == "__main__":
    main()
