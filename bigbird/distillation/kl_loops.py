r"""Four ways to compute a distillation loss and its gradients: dense, or chunk by chunk.

Axis letters: N tokens, D model, V vocabulary, K kept, C tokens of a chunk.

The student's logits are z = cap · tanh(scale · (h W + b) / cap). `dense` is the textbook formula on
`[N, V]`, differentiated by TensorFlow, and the oracle of the others. Those walk over chunks of C
tokens, with the gradient that `divergence.py` writes out:

| implementation        | alive between loss and gradient   | matrix products of 2 N D V flops |
| --------------------- | --------------------------------- | -------------------------------- |
| `dense`               | several `[N, V]`                  | 3                                |
| `forward_chunked`     | the logits, `[N, V]`              | 3                                |
| `fused`, `recompute`  | one to three normalizers, `[N]`   | 4                                |
| `fused`, `one_pass`   | the gradients, `[N, D]`, `[D, V]` | 3                                |

Source: "Efficient Knowledge Distillation for LLMs", arXiv:2608.03796 (fused chunked loss);
Wijmans et al., arXiv:2411.09009, section 4 (logits projected again in the backward pass).
"""

from typing import NamedTuple

import tensorflow as tf

from bigbird.distillation.divergence import TopKRows, WholeRows, subtract_at
from bigbird.distillation.kl_plan import KLPlan
from bigbird.distillation.targets import TeacherLogits, TopKTargets, take_rows

# The terms of a token that are for people to read.
DIAGNOSTICS = ("student_kept_mass", "argmax_agreement", "kept_mass", "tail_kl")
BITS = tf.int16


class Formula(NamedTuple):
    """The numbers of the loss that are known when it is traced; `vocab_size` is the shared one."""

    temperature: float
    tail: str
    vocab_size: int
    logit_scale: float | None
    logit_softcap: float | None
    label_weight: float


class _Span(NamedTuple):
    """C consecutive tokens, of which `fresh` `[C]` tells those that no earlier span had."""

    start: tf.Tensor
    size: int
    fresh: tf.Tensor

    def take(self, tensors):
        """The span's part of tensors `[N, ...]`."""
        return tf.nest.map_structure(lambda t: take_rows(t, self.start, self.size), tensors)

    def put(self, tensors, rows):
        """The tensors `[N, ...]` with the span's fresh `rows` `[C, ...]` in place of theirs."""
        return tf.nest.map_structure(self._put, tensors, rows)

    def _put(self, tensor, rows):
        fresh = tf.reshape(self.fresh, [-1] + [1] * (rows.shape.rank - 1))
        places = self.start + tf.range(self.size)
        rows = tf.where(fresh, rows, take_rows(tensor, self.start, self.size))
        return tf.tensor_scatter_nd_update(tensor, places[:, tf.newaxis], rows)


class _Chunk(NamedTuple):
    """C tokens: which take part, hidden states, float32 `[C, D]`, teacher rows, labels or -1."""

    active: tf.Tensor
    hidden: tf.Tensor
    rows: TopKRows | WholeRows
    labels: tf.Tensor | None


class Problem(NamedTuple):
    """A loss to compute: the tensors of all tokens, the head, the formula and the plan."""

    hidden: tf.Tensor
    kernel: tf.Tensor
    bias: tf.Tensor | None
    weight: tf.Tensor
    labels: tf.Tensor | None
    targets: TopKTargets | TeacherLogits
    formula: Formula
    plan: KLPlan
    diagnostics: bool

    @property
    def student(self):
        """The tensors to differentiate for."""
        return (self.hidden, self.kernel) + (() if self.bias is None else (self.bias,))

    def with_student(self, hidden, kernel, bias=None):
        """The same problem for other tensors of the student."""
        return self._replace(hidden=hidden, kernel=kernel, bias=bias)

    def chunk(self, span, hidden):
        """The tokens of `hidden` `[N, D]` in `span`. What one without weight holds is not read."""
        active = span.fresh & tf.not_equal(span.take(self.weight), 0.0)
        hidden = tf.cast(_from_bits(span.take(hidden), self.hidden.dtype), tf.float32)
        labels = None
        if self.labels is not None:
            labels = span.take(self.labels)
            labels = tf.where(active & (labels < self.formula.vocab_size), labels, -1)
        rows_of = TopKRows.of if isinstance(self.targets, TopKTargets) else WholeRows.of
        rows = rows_of(
            self.targets.take(span.start, span.size),
            active,
            temperature=self.formula.temperature,
            tail=self.formula.tail,
            vocab_size=self.formula.vocab_size,
        )
        return _Chunk(active, tf.where(active[:, tf.newaxis], hidden, 0.0), rows, labels)

    def project(self, hidden):
        """The student's logits z of hidden states `[C, D]`: float32 `[C, V]`."""
        logits = _project(hidden, self.kernel, self.plan.width_tiles)
        if self.bias is not None:
            logits += tf.cast(self.bias, tf.float32)
        if self.formula.logit_scale is not None:
            logits *= self.formula.logit_scale
        if self.formula.logit_softcap is not None:
            logits = self.formula.logit_softcap * tf.tanh(logits / self.formula.logit_softcap)
        return logits[:, : self.formula.vocab_size]

    def soften(self, logits):
        """u = z / T."""
        return logits if self.formula.temperature == 1.0 else logits / self.formula.temperature

    def label_weights(self, chunk):
        """The weight of each token's hard label, 0 for one that is left out."""
        return tf.where(chunk.labels >= 0, self.formula.label_weight, 0.0)

    def terms(self, logits, chunk):
        """The loss of each token and the normalizers of its gradient: a dict of float32 `[C]`."""
        softened = self.soften(logits)
        terms = chunk.rows.normalizers(softened)
        terms["loss"] = self.formula.temperature**2 * chunk.rows.divergence(softened, terms)
        if chunk.labels is not None:
            terms["label_log_norm"] = tf.reduce_logsumexp(logits, axis=-1)
            label_logits = tf.gather(logits, tf.maximum(chunk.labels, 0), batch_dims=1)
            cross_entropy = terms["label_log_norm"] - label_logits
            terms["loss"] += tf.math.multiply_no_nan(cross_entropy, self.label_weights(chunk))
        if self.diagnostics:
            terms |= chunk.rows.diagnostics(softened, terms)
        return terms

    def begin_gradients(self, dtype):
        """What `add_gradients` adds to, for hidden `[N, D]`, kernel `[tiles, D / tiles, V]`, bias.

        The first holds the hidden states in `dtype`, as bits, until their gradients replace them.
        """
        width, vocab_size = self.kernel.shape
        tiles = self.plan.width_tiles
        return (
            _as_bits(tf.cast(self.hidden, dtype)),
            tf.zeros([tiles, width // tiles, vocab_size]),
            tf.zeros([vocab_size]),
        )

    def add_gradients(self, gradients, span, chunk, logit_gradient):
        """Adds what a chunk's `logit_gradient` `[C, V]` gives to the three gradients."""
        hidden, kernel, bias = gradients
        dtype = self.hidden.dtype if hidden.dtype == BITS else hidden.dtype
        rows = _unproject(logit_gradient, self.kernel, self.plan.width_tiles)
        return (
            span.put(hidden, _as_bits(tf.cast(rows, dtype))),
            _add_product(kernel, chunk.hidden, logit_gradient),
            bias + tf.reduce_sum(logit_gradient, axis=0),
        )

    def end_gradients(self, gradients, upstream=1.0):
        """upstream · the gradients, in the shapes and types of `student`."""
        hidden, kernel, bias = gradients
        hidden = _from_bits(hidden, self.hidden.dtype)
        return [
            tf.cast(
                upstream * tf.cast(tf.reshape(gradient, tf.shape(tensor)), tf.float32), tensor.dtype
            )
            for gradient, tensor in zip((hidden, kernel, bias), self.student, strict=False)
        ]

    def empty_terms(self):
        """Zeros `[N]` for everything that `terms` gives."""
        names = ["loss", "log_norm"]
        if self.formula.tail == "bucket" and isinstance(self.targets, TopKTargets):
            names.append("log_outside")
        if self.labels is not None:
            names.append("label_log_norm")
        if self.diagnostics:
            names += ["argmax_agreement", "student_kept_mass"]
            if self.targets.carries_mass_at(self.formula.temperature):
                names += ["kept_mass", "tail_kl"]
        return {name: tf.zeros_like(self.weight) for name in names}

    def logit_gradient(self, logits, chunk, terms, upstream):
        """upstream · ∂ loss / ∂ (h W + b) of each token: float32 `[C, V of the kernel]`."""
        upstream = tf.where(chunk.active, upstream, 0.0)
        # The loss has T², and u = z / T takes one T away.
        gradient = chunk.rows.gradient(
            self.soften(logits), terms, upstream * self.formula.temperature
        )
        if chunk.labels is not None:
            weight = (upstream * self.label_weights(chunk))[:, tf.newaxis]
            gradient += weight * tf.exp(logits - terms["label_log_norm"][:, tf.newaxis])
            gradient = subtract_at(gradient, tf.maximum(chunk.labels, 0)[:, tf.newaxis], weight)
        if self.formula.logit_softcap is not None:
            gradient *= 1.0 - tf.square(logits / self.formula.logit_softcap)
        if self.formula.logit_scale is not None:
            gradient *= self.formula.logit_scale
        padding = self.kernel.shape[1] - self.formula.vocab_size
        return tf.pad(gradient, [[0, 0], [0, padding]]) if padding else gradient


# Loops are written out here; converting the code of this file would only slow down tracing.
@tf.autograph.experimental.do_not_convert
def evaluate(problem, reduction):
    """The loss, and the diagnostics of each token if wanted: a dict of `[N]`."""
    # An eager loop would copy an accumulator to add to it, and make gradients nobody asked for.
    run = _run_as_graph if tf.executing_eagerly() else _run
    return run(problem, reduction)


def _run(problem, reduction):
    """The loss, and what is known of each token: a dict of `[N]`."""
    weight = shares(problem.weight) if reduction == "mean" else problem.weight
    if problem.plan.gradient == "one_pass":
        loss, terms = _one_pass(problem, weight)
    else:
        compute = _dense if problem.plan.implementation == "dense" else _two_passes
        terms = compute(problem)
        loss = tf.math.multiply_no_nan(terms["loss"], weight)
        loss = loss if reduction == "none" else tf.reduce_sum(loss)
    names = [name for name in terms if name in DIAGNOSTICS]
    return loss, {name: tf.stop_gradient(terms[name]) for name in names}


_run_as_graph = tf.function(_run, autograph=False)


def shares(weight):
    """What each token counts for in a weighted mean; 0 where all weights are 0."""
    return tf.math.divide_no_nan(weight, tf.reduce_sum(weight))


def total(values, weights):
    """Σ weight · value, where a weight of 0 silences any value."""
    return tf.reduce_sum(tf.math.multiply_no_nan(values, weights))


def _dense(problem):
    """The terms of all tokens by the textbook formula, which TensorFlow differentiates."""
    tokens = tf.shape(problem.hidden)[0]
    chunk = problem.chunk(_Span(0, tokens, tf.ones([tokens], tf.bool)), problem.hidden)
    logits = problem.project(chunk.hidden)
    softened = problem.soften(logits)
    loss = problem.formula.temperature**2 * chunk.rows.textbook(softened)
    if chunk.labels is not None:
        cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=tf.maximum(chunk.labels, 0), logits=logits
        )
        loss += tf.math.multiply_no_nan(cross_entropy, problem.label_weights(chunk))
    return problem.terms(tf.stop_gradient(logits), chunk) | {"loss": loss}


def _two_passes(problem):
    """The terms of all tokens; the gradient projects every chunk again, or reads kept logits."""

    @tf.custom_gradient
    def losses_and_terms(*student):
        inputs = problem.with_student(*student)
        buffers = {"terms": inputs.empty_terms()}
        if inputs.plan.implementation == "forward_chunked":
            shape = tf.stack([tf.shape(inputs.hidden)[0], inputs.formula.vocab_size])
            buffers["logits"] = tf.zeros(shape)

        def forward(span, buffers):
            chunk = inputs.chunk(span, _as_bits(inputs.hidden))
            logits = inputs.project(chunk.hidden)
            rows = {"terms": inputs.terms(logits, chunk), "logits": logits}
            return {name: span.put(buffer, rows[name]) for name, buffer in buffers.items()}

        kept = _each_span(inputs, forward, buffers)
        terms = kept["terms"]

        def gradient(upstream, *_):
            def backward(span, gradients):
                chunk = inputs.chunk(span, gradients[0])
                logits = (
                    span.take(kept["logits"]) if "logits" in kept else inputs.project(chunk.hidden)
                )
                logit_gradient = inputs.logit_gradient(
                    logits, chunk, span.take(terms), span.take(upstream)
                )
                return inputs.add_gradients(gradients, span, chunk, logit_gradient)

            gradients = inputs.begin_gradients(inputs.hidden.dtype)
            return inputs.end_gradients(_each_span(inputs, backward, gradients))

        return (terms["loss"], terms), gradient

    loss, terms = losses_and_terms(*problem.student)
    return terms | {"loss": loss}


def _one_pass(problem, weight):
    """Σ weight · loss and the terms of all tokens; one loop makes the gradients as well.

    Where no gradient is asked for, the graph's optimiser, or XLA, removes what makes them.
    """

    @tf.custom_gradient
    def total_and_terms(weight, *student):
        inputs = problem.with_student(*student)

        def step(span, state):
            terms, gradients = state
            chunk = inputs.chunk(span, gradients[0])
            logits = inputs.project(chunk.hidden)
            rows = inputs.terms(logits, chunk)
            logit_gradient = inputs.logit_gradient(logits, chunk, rows, span.take(weight))
            return (
                span.put(terms, rows),
                inputs.add_gradients(gradients, span, chunk, logit_gradient),
            )

        # Small gradients vanish in float16 before a loss scale, which comes later, can raise them.
        half = inputs.hidden.dtype == tf.float16
        gradients = inputs.begin_gradients(tf.float32 if half else inputs.hidden.dtype)
        terms, gradients = _each_span(inputs, step, (inputs.empty_terms(), gradients))

        def gradient(upstream, *_):
            return (upstream * terms["loss"], *inputs.end_gradients(gradients, upstream))

        return (total(terms["loss"], weight), terms), gradient

    return total_and_terms(weight, *problem.student)


def _each_span(problem, step, state):
    """Runs `state = step(span, state)` for one span of tokens after another.

    All spans have one size. The last one starts early enough for that, so it may repeat tokens.
    """
    tokens, size = problem.hidden.shape[0], problem.plan.chunk_tokens
    if tokens == 0:
        return state
    if tokens is None:
        tokens = tf.shape(problem.hidden)[0]
        size = tf.maximum(tf.minimum(size, tokens), 1)

    def body(index, state):
        start = tf.minimum(index * size, tokens - size)
        fresh = start + tf.range(size) >= index * size
        return index + 1, step(_Span(start, size, fresh), state)

    count = -(-tokens // size)
    # Spans that run side by side would each hold their logits.
    return tf.while_loop(lambda index, _: index < count, body, (0, state), parallel_iterations=1)[1]


def _project(hidden, kernel, tiles):
    """h W in float32: `[C, V]`, for float32 hidden states `[C, D]`."""
    if kernel.dtype == tf.float32 or tiles == 1:
        return tf.matmul(hidden, tf.cast(kernel, tf.float32))
    # Widened as a whole, a 16-bit head would be there a second time, in twice its size.
    size = kernel.shape[0] // tiles

    def add_tile(index, logits):
        columns = _take_columns(hidden, index * size, size)
        return index + 1, logits + tf.matmul(columns, _widen_rows(kernel, index * size, size))

    logits = tf.zeros(tf.stack([tf.shape(hidden)[0], kernel.shape[1]]))
    return _each_tile(tiles, add_tile, logits)


def _unproject(logit_gradient, kernel, tiles):
    """G Wᵀ in float32: `[C, D]`, for a gradient in the logits `[C, V]`."""
    if kernel.dtype == tf.float32 or tiles == 1:
        return tf.matmul(logit_gradient, tf.cast(kernel, tf.float32), transpose_b=True)
    size = kernel.shape[0] // tiles

    def put_tile(index, parts):
        rows = _widen_rows(kernel, index * size, size)
        part = tf.matmul(rows, logit_gradient, transpose_b=True)
        return index + 1, tf.tensor_scatter_nd_update(parts, [[index]], part[tf.newaxis])

    parts = tf.zeros(tf.stack([tiles, size, tf.shape(logit_gradient)[0]]))
    parts = _each_tile(tiles, put_tile, parts)
    return tf.transpose(tf.reshape(parts, tf.stack([kernel.shape[0], tf.shape(parts)[2]])))


def _add_product(total, hidden, logit_gradient):
    """`total` `[tiles, D / tiles, V]` with hᵀ G added.

    The product of a whole chunk would be as large as the head, so it is made by the tile.
    """
    tiles, size, _ = total.shape

    def add_tile(index, total):
        columns = _take_columns(hidden, index * size, size)
        part = tf.matmul(columns, logit_gradient, transpose_a=True)
        return index + 1, tf.tensor_scatter_nd_add(total, [[index]], part[tf.newaxis])

    return _each_tile(tiles, add_tile, total)


def _each_tile(tiles, step, state):
    return tf.while_loop(lambda index, _: index < tiles, step, (0, state), parallel_iterations=1)[1]


def _take_columns(hidden, start, size):
    return tf.slice(hidden, [0, start], [tf.shape(hidden)[0], size])


def _widen_rows(kernel, start, size):
    """Rows of a 16-bit kernel in float32."""
    return tf.cast(_from_bits(take_rows(_as_bits(kernel), start, size), kernel.dtype), tf.float32)


def _as_bits(tensor):
    """A 16-bit float tensor as integers: XLA:CPU widens all of a float one that a loop slices."""
    return tf.bitcast(tensor, BITS) if tensor.dtype.size == 2 else tensor


def _from_bits(tensor, dtype):
    return tf.bitcast(tensor, dtype) if tensor.dtype == BITS else tensor
