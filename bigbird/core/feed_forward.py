"""The feed-forward of a transformer layer, streamed over tokens where the layer is recomputed.

Axis letters: N tokens of all documents, C of them at a time, D model, I intermediate.

    y = act(x W1 + b1) W2 + b2

The hidden states act(x W1 + b1) are several times as wide as all else in a layer, and their
gradients are as wide again. What a recomputed layer (`recompute_grad`) keeps is alive all at once
while its gradient is computed, so there a large feed-forward keeps nothing but x: its backward pass
computes the hidden states again, C tokens at a time, at the price of one product in nine. The
gradients of the weights are then sums of parts, which are rounded otherwise.

Source: Kitaev et al., "Reformer", arXiv:2001.04451, section 3 (chunks of tokens).
"""

from __future__ import annotations

import tensorflow as tf

from bigbird.core.recompute_grad import is_recomputed
from bigbird.core.streaming import differentiable_once, plan_steps, size, split, stream

# Hidden numbers computed at once, and from how many on it is worth a loop.
AT_ONCE = 2**20
STREAMED = 4 * AT_ONCE


def feed_forward(inputs, intermediate, output):
    """Applies two dense layers, one after the other.

    Args:
      inputs: `[…, D]`, in the compute dtype of the calling layer. A size that is not known when
        the graph is traced counts as 1.
      intermediate: `keras.layers.Dense` of I units, built, with a bias. Its activation acts on each
        token by itself and has no variables.
      output: `keras.layers.Dense`, built, with a bias and without activation.

    Returns:
      `[…, D]`. Where it is streamed it has no second derivative.
    """
    tokens = tf.TensorShape([n or 1 for n in inputs.shape[:-1]]).num_elements()
    if not is_recomputed() or tokens * intermediate.units < STREAMED:
        return output(intermediate(inputs))
    weights = [intermediate.kernel, intermediate.bias, output.kernel, output.bias]
    outputs = _streamed(
        tf.reshape(inputs, [-1, inputs.shape[-1]]),
        *map(tf.convert_to_tensor, weights),
        intermediate.activation,
    )
    return tf.reshape(outputs, tf.concat([tf.shape(inputs)[:-1], [output.units]], axis=0))


def _streamed(tokens, kernel, bias, output_kernel, output_bias, activation):
    """`[N, D]` -> `[N, D]`."""
    num_tokens = size(tokens, 0)
    steps, at_once = plan_steps(num_tokens, AT_ONCE // kernel.shape[1])

    def apply(function, per_token, width, sums=()):
        """Streams a function of parts `[C, …]`, whose first result is `[C, width]`."""
        per_token = [split(x, steps, at_once) for x in per_token]

        def step(number, sums):
            part, *added = function(*(x[number] for x in per_token))
            return [part], [
                total + tf.cast(x, total.dtype) for total, x in zip(sums, added, strict=True)
            ]

        shapes = [[at_once, width]]
        (parts,), sums = stream(step, steps, shapes, per_token[-1], sums, tokens.dtype)
        return tf.reshape(parts, [-1, width])[:num_tokens], sums

    def forward(tokens, kernel, bias, output_kernel, output_bias):
        def outputs_of(part):
            hidden = activation(tf.matmul(part, kernel) + bias)
            return (tf.matmul(hidden, output_kernel) + output_bias,)

        outputs, _ = apply(outputs_of, [tokens], output_kernel.shape[1])
        return outputs

    def backward(tokens, kernel, bias, output_kernel, output_bias, upstream):
        def gradients_of(part, slope):
            before = tf.matmul(part, kernel) + bias
            with tf.GradientTape() as tape:
                tape.watch(before)
                hidden = activation(before)
            hidden_slope = tf.matmul(slope, output_kernel, transpose_b=True)
            before_slope = tape.gradient(hidden, before, hidden_slope)
            return (
                tf.matmul(before_slope, kernel, transpose_b=True),
                tf.matmul(part, before_slope, transpose_a=True),
                tf.reduce_sum(before_slope, axis=0),
                tf.matmul(hidden, slope, transpose_a=True),
                tf.reduce_sum(slope, axis=0),
            )

        weights = [kernel, bias, output_kernel, output_bias]
        shapes = [weight.shape for weight in weights]
        slopes, sums = apply(gradients_of, [tokens, upstream], kernel.shape[0], shapes)
        return [slopes, *(tf.cast(x, w.dtype) for x, w in zip(sums, weights, strict=True))]

    @tf.custom_gradient
    def streamed(*arguments):
        # Copies that no tape watches: an eager tape would keep all that the loop computes.
        outputs = forward(*map(tf.stop_gradient, arguments))
        return outputs, lambda upstream: differentiable_once(backward, *arguments, upstream)

    return streamed(tokens, kernel, bias, output_kernel, output_bias)
