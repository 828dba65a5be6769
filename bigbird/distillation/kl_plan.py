"""Which implementation a distillation loss runs, in what chunks, and the bytes it is to take.

Axis letters: N tokens, D model, V vocabulary, C tokens of a chunk.
"""

from typing import NamedTuple

import tensorflow as tf
from absl import logging

from bigbird.distillation.targets import require_choice

IMPLEMENTATIONS = ("auto", "dense", "forward_chunked", "fused")
GRADIENTS = ("auto", "one_pass", "recompute")

# A chunk of this size keeps a processor busy; a larger one only costs memory.
CHUNK_TOKENS = 1024
CHUNK_BYTES = 256 * 2**20
# With fewer tokens, reading the head takes longer than multiplying by it.
SMALLEST_CHUNK_TOKENS = 16
# The head's gradient is made and added in tiles of this size.
TILE_BYTES = 128 * 2**20

# Arrays of the size of the logits that are alive at once, in float32: by XLA's plans, and by peak
# memory without XLA.
DENSE_ARRAYS = 5
CHUNK_ARRAYS = 3
FLOAT32_BYTES = 4


class KLPlan(NamedTuple):
    """How a loss is computed.

    Attributes:
      implementation: `dense`, `forward_chunked` or `fused`.
      gradient: `one_pass` or `recompute` for `fused`, else None.
      chunk_tokens: C, tokens projected at a time.
      width_tiles: parts of the D axis in which the head's gradient is added up, and in which a
        16-bit head is widened.
      expected_bytes: most bytes that loss and gradients add to the inputs; for N = C where N is
        not known.
    """

    implementation: str
    gradient: str | None
    chunk_tokens: int
    width_tiles: int
    expected_bytes: int

    def __str__(self):
        gradient = f", gradient by {self.gradient}" if self.gradient else ""
        return (
            f"{self.implementation}{gradient}, {self.chunk_tokens:,} tokens at a time "
            f"({self.expected_bytes / 2**20:,.1f} MiB)"
        )


def plan_kl(
    tokens,
    width,
    vocab_size,
    *,
    dtype=tf.float32,
    kernel_dtype=tf.float32,
    per_token=False,
    implementation="auto",
    gradient="auto",
    chunk_tokens=None,
    memory_budget_bytes=None,
):
    """Plans a `topk_kl`, which calls this itself; allocates and runs nothing.

    `auto` takes `fused`: nothing else adds less memory, and `one_pass` multiplies no more than
    `dense`. A loss of each token (`reduction="none"`) cannot be differentiated in one pass; there
    `auto` takes `forward_chunked`, which saves the fourth product, if its kept logits fit a budget
    that was given, else `recompute`. Float16 is recomputed too: only a second pass sees the loss
    scale before it rounds.

    Args:
      tokens: N, or None if unknown; a budget then limits a single chunk.
      width: D.
      vocab_size: V of the head.
      dtype: type of the hidden states.
      kernel_dtype: type of the head.
      per_token: whether the loss of each token is wanted, not their sum or mean.
      implementation, gradient, chunk_tokens, memory_budget_bytes: as in `topk_kl`.

    Returns:
      A `KLPlan`.

    Raises:
      ValueError: an unknown name, a gradient that the implementation cannot make, or a budget that
        the smallest chunk exceeds.
    """
    require_choice("implementation", implementation, IMPLEMENTATIONS)
    require_choice("gradient", gradient, GRADIENTS)
    if gradient != "auto" and implementation not in ("auto", "fused"):
        raise ValueError(
            f"gradient={gradient!r} belongs to implementation='fused'; received {implementation!r}."
        )
    if gradient == "one_pass" and per_token:
        raise ValueError(
            "gradient='one_pass' needs a scalar loss; received reduction='none'. Use 'recompute'."
        )
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1; received {chunk_tokens}.")
    sizes = _Sizes(tokens, width, vocab_size, tf.as_dtype(dtype), tf.as_dtype(kernel_dtype))
    if gradient == "auto":
        gradient = "recompute" if per_token or sizes.dtype == tf.float16 else "one_pass"
    candidates = [implementation]
    if implementation == "auto":
        may_keep_logits = per_token and memory_budget_bytes is not None
        candidates = ["forward_chunked", "fused"] if may_keep_logits else ["fused"]
    for candidate in candidates:
        plan = _fit(candidate, gradient, sizes, chunk_tokens, memory_budget_bytes)
        if memory_budget_bytes is None or plan.expected_bytes <= memory_budget_bytes:
            logging.info("Distillation loss of %s by %s.", sizes, plan)
            return plan
    raise ValueError(
        f"memory_budget_bytes={memory_budget_bytes} is less than the {plan.expected_bytes} bytes "
        f"that {plan.implementation} takes with chunks of {plan.chunk_tokens} tokens, gradients "
        "included. Raise the budget, or pass fewer tokens at a time."
    )


class _Sizes(NamedTuple):
    """What the bytes of a loss depend on."""

    tokens: int | None
    width: int
    vocab_size: int
    dtype: tf.DType
    kernel_dtype: tf.DType

    def __str__(self):
        tokens = "any number of" if self.tokens is None else f"{self.tokens:,}"
        return (
            f"{tokens} tokens of width {self.width:,} ({self.dtype.name}) over "
            f"{self.vocab_size:,} words ({self.kernel_dtype.name})"
        )

    def plan(self, implementation, gradient, chunk_tokens, width_tiles):
        """The plan with its `expected_bytes`: an upper bound, as buffers may share memory."""
        tokens = chunk_tokens if self.tokens is None else self.tokens
        hidden, head = tokens * self.width, self.width * self.vocab_size
        logits_bytes = tokens * self.vocab_size * FLOAT32_BYTES
        expected = hidden * self.dtype.size + head * self.kernel_dtype.size
        if implementation == "dense":
            expected += DENSE_ARRAYS * logits_bytes
            return KLPlan(implementation, None, chunk_tokens, width_tiles, expected)
        if implementation == "forward_chunked":
            gradient = None
            expected += logits_bytes
        # 16-bit gradients are made elsewhere: the head's in float32, the hidden states' as bits, or
        # in float32 where they wait for a loss scale.
        if self.dtype.size < FLOAT32_BYTES:
            waits = self.dtype == tf.float16 and gradient == "one_pass"
            expected += hidden * (FLOAT32_BYTES if waits else self.dtype.size)
        tile_rows = self.width // width_tiles
        if self.kernel_dtype.size < FLOAT32_BYTES:
            # XLA lends the memory of a result to an earlier array that fits in it.
            fits = head * FLOAT32_BYTES <= hidden * self.dtype.size
            expected += 0 if fits else head * FLOAT32_BYTES
            tile_rows *= 2
        rows = CHUNK_ARRAYS * chunk_tokens + tile_rows
        expected += rows * self.vocab_size * FLOAT32_BYTES
        return KLPlan(implementation, gradient, chunk_tokens, width_tiles, expected)


def _fit(implementation, gradient, sizes, chunk_tokens, budget):
    """The plan with the largest chunks that fit the budget, or with the smallest there are."""
    if implementation == "dense":
        return sizes.plan(implementation, gradient, sizes.tokens or 1, 1)
    row_bytes = sizes.vocab_size * FLOAT32_BYTES
    fitting = max(CHUNK_BYTES // row_bytes, SMALLEST_CHUNK_TOKENS)
    chunk = chunk_tokens or min(CHUNK_TOKENS, 1 << (fitting.bit_length() - 1))
    smallest = chunk_tokens or SMALLEST_CHUNK_TOKENS
    if sizes.tokens is not None:
        chunk = max(min(chunk, sizes.tokens), 1)
    tile_rows = max(min(sizes.width, TILE_BYTES // row_bytes), 1)
    while True:
        plan = sizes.plan(implementation, gradient, chunk, _fewest_tiles(sizes.width, tile_rows))
        if budget is None or plan.expected_bytes <= budget:
            return plan
        if chunk > smallest and chunk >= tile_rows:
            chunk = max(chunk // 2, smallest)
        elif tile_rows > 1:
            tile_rows //= 2
        else:
            return plan


def _fewest_tiles(width, rows):
    """The smallest divisor of `width` that leaves at most `rows` of it to a tile."""
    return next(n for n in range(1, width + 1) if width % n == 0 and width // n <= rows)
