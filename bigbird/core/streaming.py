"""Loops for computations that go part by part, so that only one part's intermediates are alive.

Axis letters: none; a result is `[steps, *shape of a part]`.
"""

from __future__ import annotations

import tensorflow as tf

from bigbird.core.recompute_grad import after


def stream(function, steps, shapes, newest, sums=(), dtype=tf.float32):
    """Calls `function` for one step after another; its parts are written in place.

    Args:
      function: of the number of the step and the sums so far; returns a list of parts, one of
        `dtype` for each of `shapes`, and the new sums.
      steps: int or int32 scalar.
      shapes: of a step's parts. Sizes may be tensors.
      newest: a floating tensor that the loop waits for.
      sums: shapes of tensors that begin as zeros: float64 if `dtype` is, else float32.

    Returns:
      The results, a list of `[steps, *shape]`, and the sums.
    """
    # XLA makes constants for all layers of a model at once and early: begin with ones it cannot
    # know. Those of the results differ, because it copies equal ones.
    (zero,) = after([newest], [tf.zeros([], dtype)])
    results = [
        tf.TensorArray(dtype, steps, element_shape=_known(shape)).unstack(
            tf.broadcast_to(zero + number, [steps, *shape])
        )
        for number, shape in enumerate(shapes, start=1)
    ]
    of_sums = tf.cast(zero, tf.float64 if dtype == tf.float64 else tf.float32)
    sums = [tf.broadcast_to(of_sums, shape) for shape in sums]

    def body(step, results, sums):
        parts, sums = function(step, sums)
        written = [x.write(step, part) for x, part in zip(results, parts, strict=True)]
        return step + 1, written, sums

    _, results, sums = tf.while_loop(
        lambda step, *_: step < steps, body, (0, results, sums), parallel_iterations=1
    )
    return [result.stack() for result in results], sums


def _known(shape):
    return [size if isinstance(size, int) else None for size in shape]


def split(tensor, steps, at_once):
    """`[N, …]` -> `[steps, at_once, …]`, filled up with zeros (False)."""
    rest = tensor.shape[1:]
    filled = tf.pad(tensor, [[0, steps * at_once - size(tensor, 0)], *[[0, 0]] * len(rest)])
    return tf.reshape(filled, [steps, at_once, *rest])


def plan_steps(number, at_once):
    """Returns steps, and the items of each, for `number` items of which `at_once` fit one step."""
    steps = _at_least_one(-(-number // _at_least_one(at_once)))
    return steps, -(-number // steps)


def _at_least_one(number):
    return max(1, number) if isinstance(number, int) else tf.maximum(1, number)


def size(tensor, axis):
    """The size of an axis: an int, or a scalar tensor where the graph does not know it yet."""
    known = tensor.shape[axis]
    return tf.shape(tensor)[axis] if known is None else known


def differentiable_once(gradients, *inputs):
    """Calls `gradients`, a function of a first derivative, so that a second is a LookupError."""

    @tf.custom_gradient
    def call(*inputs):
        return gradients(*(tf.stop_gradient(x) for x in inputs)), _refuse

    return call(*inputs)


def _refuse(*unused_gradients):
    raise LookupError("A computation that is streamed has no second derivative.")
