"""Benchmark of attention: the streamed core against what it replaces, forward and backward.

    python -m benchmarks.bench_attention                   # all parts, 40 minutes on two cores
    python -m benchmarks.bench_attention --parts=compare   # all variants at 4,096 tokens

Variants, for one document, 12 heads of 64, blocks of 64 and 3 random blocks:

* `streamed`, `streamed dense`: `attention_core.attend` with the pattern and without one.
* `five-case`: block-sparse attention arranged as in 2021, with a case of its own for the first,
  the second, the middle, the last but one and the last row.
* `gathered`: the same pattern in one case, which gathers all key blocks of a row.
* `full`: attention of all pairs.

The last three keep their probabilities for the backward pass, as automatic differentiation does.

Axis letters: B batch, H heads, L, Q and T tokens, E per head, N blocks, M middle blocks, S tokens
in a block, P tokens in the key blocks of a row, R random blocks.
"""

from __future__ import annotations

import argparse
import re

import tensorflow as tf

from benchmarks import harness
from bigbird.core.attention_core import attend
from bigbird.core.block_layout import ABSENT, FIXED_BLOCKS, model_layout
from bigbird.core.encoder import EncoderLayer
from bigbird.core.memory import planned_memory

HEADS, WIDTH, BLOCK, RANDOM = 12, 64, 64, 3
COMPARED_LENGTH = 4096
LENGTHS = [2**n for n in range(9, 17)]
# Longer inputs take more memory or time than a small machine has.
LONGEST = {"full": 8192, "streamed dense": 8192, "five-case": 16384, "gathered": 16384}
JIT_COMPILE = {"graph": False, "xla": True}
MASKED = -10000.0
MIB = 2**20


# ---------------------------------------------------------------------------- variants


def full_attention(query, key, value, real):
    """Attention of all pairs: `[B, H, Q, E]`, `[B, H, T, E]`; `real` `[B, 1 or H, T]`, 0 or 1."""
    scores = tf.einsum("BHQE,BHTE->BHQT", query, key) * WIDTH**-0.5
    probabilities = tf.nn.softmax(scores + _penalty(real)[:, :, tf.newaxis])
    return tf.einsum("BHQT,BHTE->BHQE", probabilities, value)


def gathered_attention(query, key, value, real, layout):
    """Block-sparse attention whose middle rows gather all the key blocks they list."""
    listed = layout.key_blocks[:, 1:-1]
    absent = tf.where(listed == ABSENT, MASKED, 0.0)[..., tf.newaxis]
    listed = tf.maximum(listed, 0)
    queries, keys, values = (_split(x) for x in (query, key, value))
    row_penalty = _join(tf.gather(_split_tokens(_penalty(real)), listed, axis=1) + absent)

    scores = tf.einsum("BHMSE,BHMPE->BHMSP", queries[:, :, 1:-1], _gather(keys, listed))
    probabilities = tf.nn.softmax(scores * WIDTH**-0.5 + row_penalty[:, :, :, tf.newaxis])
    middle = tf.einsum("BHMSP,BHMPE->BHMSE", probabilities, _gather(values, listed))

    first, last = (full_attention(queries[:, :, row], key, value, real) for row in (0, -1))
    return _stack_rows(first, middle, last, query)


def five_case_attention(query, key, value, real, layout):
    """Block-sparse attention with a case for each kind of row, each scored, scaled and masked.

    Middle rows meet the window as three copies of the keys, each a block further, the random
    blocks as gathered ones, and the first and the last block as they are. Window and random blocks
    are masked by pairs, real query and real key, the others by keys.
    """
    random = layout.key_blocks[:, 1:-1, FIXED_BLOCKS:]
    queries, keys, values = (_split(x) for x in (query, key, value))
    real_blocks = _split_tokens(real)
    random_keys, random_values = _gather(keys, random), _gather(values, random)
    real_random = _join(tf.gather(real_blocks, random, axis=1))
    real_by_head = tf.repeat(real_blocks[:, tf.newaxis], HEADS, axis=1)

    def row(number, row_keys, row_values, row_real):
        return full_attention(queries[:, :, number], row_keys, row_values, row_real)

    def edge_row(number, listed, random_row):
        """A row beside a global one, which lists the given blocks and its random ones."""

        def beside(blocks, random_blocks):
            parts = [blocks[:, :, block] for block in listed]
            return tf.concat([*parts, random_blocks[:, :, random_row]], axis=2)

        pairs = ((keys, random_keys), (values, random_values), (real_by_head, real_random))
        return row(number, *(beside(*pair) for pair in pairs))

    def window(blocks, axis):
        shifted = [blocks[:, :, 1:-3], blocks[:, :, 2:-2], blocks[:, :, 3:-1]]
        return tf.concat(shifted, axis)

    middle_queries, real_queries = queries[:, :, 2:-2], real_blocks[:, 2:-2]
    window_keys, window_values = window(keys, axis=3), window(values, axis=3)
    real_window = window(real_blocks[:, tf.newaxis], axis=3)
    window_pairs = tf.einsum("BMS,BAMP->BAMSP", real_queries, real_window)
    random_pairs = tf.einsum("BMS,BHMP->BHMSP", real_queries, real_random[:, :, 1:-1])
    middle_random_keys, middle_random_values = random_keys[:, :, 1:-1], random_values[:, :, 1:-1]

    def middle_scores(equation, case_keys, case_real):
        scores = tf.einsum(equation, middle_queries, case_keys) * WIDTH**-0.5
        return scores + _penalty(case_real)

    scores = [
        middle_scores("BHMSE,BHPE->BHMSP", keys[:, :, 0], _keys_of_block(real_blocks, 0)),
        middle_scores("BHMSE,BHMPE->BHMSP", window_keys, window_pairs),
        middle_scores("BHMSE,BHMPE->BHMSP", middle_random_keys, random_pairs),
        middle_scores("BHMSE,BHPE->BHMSP", keys[:, :, -1], _keys_of_block(real_blocks, -1)),
    ]
    first, near, drawn, last = tf.split(
        tf.nn.softmax(tf.concat(scores, axis=-1)), [BLOCK, 3 * BLOCK, RANDOM * BLOCK, BLOCK], -1
    )
    middle = (
        tf.einsum("BHMSP,BHPE->BHMSE", first, values[:, :, 0])
        + tf.einsum("BHMSP,BHMPE->BHMSE", near, window_values)
        + tf.einsum("BHMSP,BHMPE->BHMSE", drawn, middle_random_values)
        + tf.einsum("BHMSP,BHPE->BHMSE", last, values[:, :, -1])
    )

    second = edge_row(1, (0, 1, 2, -1), 0)[:, :, tf.newaxis]
    last_but_one = edge_row(-2, (0, -3, -2, -1), -1)[:, :, tf.newaxis]
    middle = tf.concat([second, middle, last_but_one], axis=2)
    first, last = (row(number, key, value, real) for number in (0, -1))
    return _stack_rows(first, middle, last, query)


def _penalty(real):
    """What is added to scores: 0 where `real` is 1, `MASKED` where it is 0."""
    return (1.0 - real) * MASKED


def _keys_of_block(real_blocks, block):
    """`[B, N, S]` -> `[B, 1, 1, 1, S]` of one block."""
    return real_blocks[:, block][:, tf.newaxis, tf.newaxis, tf.newaxis]


def _split(tensor):
    """`[B, H, L, E]` -> `[B, H, N, S, E]`."""
    return tf.reshape(tensor, [-1, HEADS, tensor.shape[2] // BLOCK, BLOCK, WIDTH])


def _split_tokens(tensor):
    """`[B, 1, L]` -> `[B, N, S]`."""
    return tf.reshape(tensor, [-1, tensor.shape[2] // BLOCK, BLOCK])


def _gather(blocks, listed):
    """Blocks `[B, H, N, S, E]` by ids `[H, M, K]`: `[B, H, M, P, E]`."""
    by_head = tf.repeat(listed[tf.newaxis], tf.shape(blocks)[0], axis=0)
    gathered = tf.gather(blocks, by_head, batch_dims=2)
    return tf.reshape(gathered, [-1, *listed.shape[:2], listed.shape[2] * BLOCK, WIDTH])


def _join(tensor):
    """`[B, H, M, K, S]` -> `[B, H, M, P]`."""
    return tf.reshape(tensor, [-1, *tensor.shape[1:3], tensor.shape[3] * BLOCK])


def _stack_rows(first, middle, last, query):
    rows = tf.concat([first[:, :, tf.newaxis], middle, last[:, :, tf.newaxis]], axis=2)
    return tf.reshape(rows, tf.shape(query))


def variants(length):
    """Returns the functions of (query, key, value, token_mask) to compare at a length."""
    layout = model_layout(length, BLOCK, RANDOM, HEADS, seed=0)

    def masked(attention, *options):
        def attend_and_mask(query, key, value, token_mask):
            real = tf.cast(token_mask, tf.float32)[:, tf.newaxis]
            output = attention(query, key, value, real, *options)
            return tf.where(token_mask[:, tf.newaxis, :, tf.newaxis], output, 0.0)

        return attend_and_mask

    dense = {"full": masked(full_attention), "streamed dense": attend}
    sparse = {
        "streamed": lambda *inputs: attend(*inputs, layout),
        "five-case": masked(five_case_attention, layout),
        "gathered": masked(gathered_attention, layout),
    }
    functions = dense if layout is None else sparse | dense
    return {name: f for name, f in functions.items() if length <= LONGEST.get(name, length)}


def forward_and_backward(attention):
    """Returns a step of (query, key, value, upstream gradient): output and gradients."""

    def step(query, key, value, upstream):
        token_mask = tf.ones([query.shape[0], query.shape[2]], tf.bool)
        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            output = attention(query, key, value, token_mask)
        return output, tape.gradient(output, [query, key, value], output_gradients=upstream)

    return step


def runnable(name, mode, length):
    """Returns a function without arguments that makes one step on random inputs."""
    step = tf.function(forward_and_backward(variants(length)[name]), jit_compile=JIT_COMPILE[mode])
    shape = [1, HEADS, length, WIDTH]
    inputs = [tf.random.stateless_normal(shape, [length, salt]) for salt in range(4)]
    return lambda: step(*inputs)


# ---------------------------------------------------------------------------- measurements


def planned_bytes(name, length):
    """Plans a step without running it."""
    specs = [tf.TensorSpec([1, HEADS, length, WIDTH])] * 4
    return planned_memory(forward_and_backward(variants(length)[name]), *specs).total_bytes


def measured_rows(length, modes, repeats):
    """Measures time turn by turn, planned bytes, and peak memory in a process each."""
    names = list(variants(length))
    steps = {(name, mode): runnable(name, mode, length) for mode in modes for name in names}
    for (name, mode), timing in harness.measure_in_turn(steps, repeats).items():
        argv = ["--child", name, mode, str(length)]
        yield harness.Row(
            name,
            mode,
            f"B=1 H={HEADS} L={length} E={WIDTH} S={BLOCK} R={RANDOM}",
            "float32",
            timing=timing,
            planned_bytes=planned_bytes(name, length) if mode == "xla" else None,
            peak_rss_bytes=harness.peak_rss_in_fresh_process("benchmarks.bench_attention", argv),
        )


def compare_rows(repeats):
    """Compares all variants at one length and prints the ratios to the five-case kernel."""
    rows = list(measured_rows(COMPARED_LENGTH, JIT_COMPILE, repeats))
    by_name = {(row.variant, row.mode): row for row in rows}
    for (name, mode), row in by_name.items():
        ratio = row.timing.p50 / by_name["five-case", mode].timing.p50
        planned = f", {row.planned_bytes / MIB:.0f} MiB planned" if row.planned_bytes else ""
        print(f"{name}, {mode}: {ratio:.2f} of the five-case time{planned}", flush=True)
    return rows


def length_rows(repeats):
    """Measures every length under XLA, prints the crossover and draws time and memory."""
    rows = []
    for length in LENGTHS:
        rows.extend(measured_rows(length, ["xla"], repeats))
    milliseconds, mebibytes = {}, {}
    for row in rows:
        length = int(re.search(r"L=(\d+)", row.shape).group(1))
        milliseconds.setdefault(row.variant, []).append((length, row.timing.p50 * 1000))
        mebibytes.setdefault(row.variant, []).append((length, row.planned_bytes / MIB))
    full = dict(milliseconds["full"])
    for name in ("streamed", "streamed dense"):
        faster = [length for length, time in milliseconds[name] if time < full.get(length, 0)]
        print(f"{name} is faster than full attention from {min(faster, default='no')} tokens")
    short, long = COMPARED_LENGTH, LENGTHS[-1]
    planned = dict(mebibytes["streamed"])
    growth = planned[long] / planned[short]
    print(f"streamed, planned memory from {short} to {long} tokens: times {growth:.2f}")
    ends = {length: runnable("streamed", "xla", length) for length in (short, long)}
    timings = harness.measure_in_turn(ends, repeats)
    growth = timings[long].p50 / timings[short].p50
    print(f"streamed, time from {short} to {long}, turn by turn: times {growth:.2f}")
    draw = {"xlabel": "tokens", "title": "Attention, forward and backward, 12 heads of 64, XLA"}
    results = harness.RESULTS
    harness.draw(results / "attention_time.png", milliseconds, ylabel="milliseconds", **draw)
    harness.draw(results / "attention_memory.png", mebibytes, ylabel="planned MiB", **draw)
    return rows


def layer_rows(repeats):
    """Times a layer of the base model in both compute dtypes, in `tf.function` mode."""
    hidden = tf.random.stateless_normal([1, COMPARED_LENGTH, HEADS * WIDTH], [0, 0])

    def step_in(policy):
        layer = EncoderLayer(
            "block_sparse",
            seq_length=COMPARED_LENGTH,
            block_size=BLOCK,
            hidden_dropout_prob=0.0,
            dtype=policy,
        )
        layer.build(hidden.shape)

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                tape.watch(hidden)
                loss = tf.reduce_mean(tf.cast(layer(hidden, training=True), tf.float32) ** 2)
            return tape.gradient(loss, [hidden, *layer.trainable_variables])

        return step

    steps = {policy: step_in(policy) for policy in ("float32", "mixed_bfloat16")}
    timings = harness.measure_in_turn(steps, repeats)
    ratio = timings["mixed_bfloat16"].p50 / timings["float32"].p50
    print(f"a base layer in mixed_bfloat16 takes {ratio:.2f} of the float32 time")
    shape = f"B=1 H={HEADS} L={COMPARED_LENGTH} E={WIDTH} S={BLOCK} R={RANDOM}"
    return [harness.Row("layer", "graph", shape, p, timing=t) for p, t in timings.items()]


def main():
    """Runs the parts, or the step of one child process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="compare,length,layer")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--child", nargs=3, metavar=("VARIANT", "MODE", "LENGTH"))
    arguments = parser.parse_args()
    if arguments.child:
        name, mode, length = arguments.child
        harness.report_peak_rss(runnable(name, mode, int(length)))
        return
    parts = {"compare": compare_rows, "length": length_rows, "layer": layer_rows}
    for part in arguments.parts.split(","):
        rows = parts[part](arguments.repeats)
        harness.write_csv(harness.RESULTS / f"attention_{part}.csv", rows)


if __name__ == "__main__":
    main()
