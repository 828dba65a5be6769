"""Rematerialization: gradients that recompute a function's intermediates instead of keeping them.

`recompute_grad(f)` computes what `f` computes. Its gradient keeps only the arguments of the call
and runs `f` a second time in the backward pass, so that a stack of layers holds the activations of
one layer at a time (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016,
arXiv:1604.06174, section 4). The second run must repeat the first exactly:

* random masks come from seeds which `RecomputeContext` derives, never from stateful generators;
* Keras's dtype casting and training mode, which live only as long as a layer's `__call__`, are
  entered again;
* arguments, bit for bit the same, wait for the incoming gradient, so that a compiler can neither
  merge the second run with the first nor start it early.
"""

import collections
import contextlib
import functools
import inspect
import numbers
import re
import threading
import zlib

import tensorflow as tf
import tf_keras as keras
from tf_keras.src.engine import base_layer_utils
from tf_keras.src.mixed_precision import autocast_variable

# Named, because the default differs between compiled and uncompiled code and a dropout mask may be
# drawn once in each.
_GENERATOR = "philox"


# --------------------------------------------------------------------------------------
# Seeds
# --------------------------------------------------------------------------------------


class _ContextStack(threading.local):
    def __init__(self):
        self.contexts = []


_stack = _ContextStack()


class RecomputeContext:
    """Gives every dropout of a forward pass, and of its recomputation, a seed of its own.

    The k-th dropout with the salt s under the context seed c draws its mask from
    `fold_in(c, crc32("s:k"))`. A training step enters the context around its forward pass with a
    seed made of the run's seed and the step, inside the `tf.function` that runs the step: masks
    then differ between layers and steps and depend on neither retracing nor compilation.

        with RecomputeContext(seed=tf.stack([run_seed, step])):
            loss = loss_fn(model(features, training=True))

    Args:
      seed: Integer scalar or shape [2]. None draws one from TensorFlow's global generator.
      is_recomputing: Whether this is the second run of a function in the backward pass.

    Attributes:
      seed: int32 tensor [2].
      is_recomputing: As given.

    Raises:
      ValueError: If `seed` is not an integer scalar or pair.
    """

    def __init__(self, seed=None, is_recomputing=False):
        self.seed = _draw_seed() if seed is None else _as_seed(seed)
        self.is_recomputing = is_recomputing
        self._uses = collections.Counter()

    def __enter__(self):
        _stack.contexts.append(self)
        return self

    def __exit__(self, *exc_info):
        _stack.contexts.pop()

    def next_seed(self, salt):
        """Returns the int32 seed [2] of the next dropout with this salt (an integer or string)."""
        use = self._uses[salt]
        self._uses[salt] += 1
        data = zlib.crc32(f"{salt}:{use}".encode()) & 0x7FFFFFFF
        return tf.random.fold_in(self.seed, data, alg=_GENERATOR)

    def replay(self):
        """Returns a function of a seed that makes a context which repeats this one from here on."""
        uses = self._uses.copy()

        def recomputing_context(seed):
            context = RecomputeContext(seed, is_recomputing=True)
            context._uses = uses.copy()
            return context

        return recomputing_context


def get_recompute_context():
    """Returns the innermost active `RecomputeContext` of this thread, or None."""
    return _stack.contexts[-1] if _stack.contexts else None


def _draw_seed():
    return tf.random.uniform([2], tf.int32.min, tf.int32.max, tf.int32)


def _as_seed(seed):
    seed = tf.convert_to_tensor(seed)
    if not seed.dtype.is_integer or not (
        seed.shape.rank == 0 or seed.shape.is_compatible_with([2])
    ):
        raise ValueError(
            "A seed must be an integer scalar or have the shape [2]; received "
            f"{seed.dtype.name} of shape {seed.shape}. Pass for example tf.stack([run_seed, step])."
        )
    seed = tf.cast(seed, tf.int32)
    return tf.stack([seed, 0]) if seed.shape.rank == 0 else seed


# --------------------------------------------------------------------------------------
# Dropout
# --------------------------------------------------------------------------------------


def stateless_dropout(x, rate, seed, noise_shape=None, name=None):
    """Sets a fraction `rate` of the elements to zero and scales the others to keep the mean.

    y = x / (1 - rate) where u >= rate, else 0, with u uniform in [0, 1) and a function of `seed`
    alone: the mask is the same in eager, graph and compiled code.

    Args:
      x: Floating tensor.
      rate: Number in [0, 1), the probability of dropping an element.
      seed: Integer tensor [2].
      noise_shape: Shape of the mask, broadcast to `x`; None entries take the size of `x`.
      name: Name of the operation.

    Returns:
      Tensor of the shape and dtype of `x`.

    Raises:
      ValueError: If `x` is not floating, or `rate`, `seed` or `noise_shape` is out of range.

    Source: Srivastava et al., "Dropout", 2014, section 4.
    """
    _check_rate(rate)
    x = tf.convert_to_tensor(x)
    if not x.dtype.is_floating:
        raise ValueError(
            f"Dropout needs a floating tensor; received {x.dtype.name} of shape {x.shape}. "
            "Cast it first."
        )
    if rate == 0:
        return x
    with tf.name_scope(name or "stateless_dropout"):
        # Comparing integers drops exactly round(rate * 2**32) of the 2**32 possible draws.
        draws = tf.random.stateless_uniform(
            _mask_shape(x, noise_shape), _as_seed(seed), None, None, tf.uint32, alg=_GENERATOR
        )
        keep = draws >= tf.constant(round(rate * 2**32), tf.uint32)
        # 1 / (1 - rate) rounded to 16 bits would bias the mean.
        dtype = tf.float32 if x.dtype.size < 4 else x.dtype
        scaled = tf.cast(tf.cast(x, dtype) / tf.cast(1 - rate, dtype), x.dtype)
        return tf.where(keep, scaled, tf.zeros([], x.dtype))


def _check_rate(rate):
    if not isinstance(rate, numbers.Real) or not 0 <= rate < 1:
        raise ValueError(
            f"A dropout rate must be a number in [0, 1); received {rate!r}. 0 drops nothing."
        )


def _mask_shape(x, noise_shape):
    shape = tf.shape(x)
    if noise_shape is None:
        return shape
    sizes = list(noise_shape)
    if x.shape.rank is not None and len(sizes) != x.shape.rank:
        raise ValueError(
            f"noise_shape must have one entry per axis of the input, whose shape is {x.shape}; "
            f"received {sizes}. Use 1 to share the mask along an axis, None to take its size."
        )
    return tf.stack([shape[axis] if size is None else size for axis, size in enumerate(sizes)])


@keras.saving.register_keras_serializable("bigbird")
class RecomputingDropout(keras.layers.Layer):
    """Dropout whose mask in a recomputation is the mask of the forward pass.

    Takes its seed from the active `RecomputeContext`; without one it draws a seed from TensorFlow's
    global generator at every call.

    Args:
      rate: Number in [0, 1), the probability of dropping an element.
      noise_shape: Shape of the mask, see `stateless_dropout`.
      seed: Integer that sets this layer's masks apart within a context; None uses its name.
      force_recomputation: Whether a call outside any context is an error.
      **kwargs: Of `keras.layers.Layer`.

    Raises:
      ValueError: If `rate` is out of range, or at a call outside any context that was forced.
    """

    def __init__(self, rate, noise_shape=None, seed=None, force_recomputation=False, **kwargs):
        _check_rate(rate)
        super().__init__(**kwargs)
        self.rate = rate
        self.noise_shape = noise_shape
        self.seed = seed
        self.force_recomputation = force_recomputation
        self.supports_masking = True

    def call(self, inputs, training=None):
        if not training or self.rate == 0:
            return tf.identity(inputs)
        return stateless_dropout(inputs, self.rate, self._next_seed(), self.noise_shape)

    def _next_seed(self):
        context = get_recompute_context()
        if context is not None:
            return context.next_seed(self._salt())
        if self.force_recomputation:
            raise ValueError(
                f"Dropout '{self.name}' has force_recomputation=True and was called outside a "
                "RecomputeContext. Call it inside recompute_grad, or enter a RecomputeContext "
                "around the forward pass."
            )
        return _draw_seed()

    def _salt(self):
        if self.seed is not None:
            return self.seed
        # Keras numbers unnamed layers by what else the process has built; the number says nothing
        # about this model, and the context counts layers of one name.
        return re.sub(r"_\d+$", "", self.name)

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {
            **super().get_config(),
            "rate": self.rate,
            "noise_shape": self.noise_shape,
            "seed": self.seed,
            "force_recomputation": self.force_recomputation,
        }


# --------------------------------------------------------------------------------------
# Recomputation
# --------------------------------------------------------------------------------------


def recompute_grad(f, seed=None):
    """Wraps `f` so that its gradient recomputes the intermediates of `f`.

    Values and gradients are those of `f`, in eager, graph and XLA-compiled code; between the passes
    only the arguments are held. Wrap whole layers: the backward pass holds the intermediates of one
    wrapped function at a time, and a single operation has none to save.

        layer = recompute_grad(encoder_layer)
        y = layer(x, attention_mask=mask, training=True)

    Gradients reach every tensor in the (nested) arguments and every trainable variable that `f`
    reads; a variable among the arguments reaches `f` as its value, anything else as it is. `f` runs
    twice and must do the same both times. Its outputs are all that is differentiated: a tensor that
    `f` closes over is a constant, and so is a loss that a layer inside adds with `add_loss`.

    Args:
      f: Function of any arguments that returns a nested structure with at least one tensor.
      seed: Integer scalar or pair for the dropout inside `f`. None continues the active
        `RecomputeContext`, so that masks are those of `f` unwrapped; where there is none, a seed
        is drawn at each call.

    Returns:
      Function of the same arguments and outputs.

    Raises:
      ValueError: At the call, if `seed` is malformed or `f` returns no tensor.

    Source: Chen et al., arXiv:1604.06174, section 4.
    """

    @functools.wraps(f, updated=())
    def recomputed(*args, **kwargs):
        # AutoGraph converts `f`, in both runs, wherever it would convert a direct call.
        autograph = tf.__internal__.autograph
        converted = autograph.tf_convert(f, autograph.control_status_ctx())
        return _call_and_recompute(converted, args, kwargs, seed)

    return recomputed


@tf.autograph.experimental.do_not_convert
def _call_and_recompute(f, args, kwargs, seed):
    """Calls `f` and gives the call a gradient that calls it again."""
    arguments = tf.nest.map_structure(_variable_to_tensor, (args, kwargs))
    tensors, rebuild_arguments = _split_tensors(arguments)
    context = _context_of_call(seed)
    recomputing_context = context.replay()
    # Copies in the graph of this loop or branch, all that its gradient can refer to.
    *tensors, seed = [tf.identity(x) for x in [*tensors, context.seed]]
    keras_call = _capture_keras_call()
    rebuild_outputs = None

    def run(tensors):
        args, kwargs = rebuild_arguments(tensors)
        outputs = f(*args, **kwargs)
        output_tensors, rebuild = _split_tensors(outputs)
        if not output_tensors:
            raise ValueError(
                f"A recomputed function must return a tf.Tensor; {f!r} returned {outputs!r}. "
                "Return what it computes; in a functional Keras model, wrap a layer in Recompute."
            )
        return output_tensors, rebuild

    @tf.custom_gradient
    def checkpoint(*tensors):
        nonlocal rebuild_outputs
        with context, _pause_eager_tapes():
            outputs, rebuild_outputs = run(tensors)
        bind = _bind_captures(tf.compat.v1.get_default_graph())

        def backward(*output_gradients, variables=()):
            *inputs, tied_seed = _after(output_gradients, [*tensors, seed])
            with keras_call(), recomputing_context(tied_seed):
                input_gradients, variable_gradients = bind(
                    lambda: _vector_jacobian_product(
                        lambda: run(inputs)[0], inputs, variables, output_gradients
                    )
                )
            return (input_gradients, variable_gradients) if variables else input_gradients

        return outputs, backward

    outputs = checkpoint(*tensors)
    return rebuild_outputs(outputs)


def _context_of_call(seed):
    active = get_recompute_context()
    return RecomputeContext(seed) if seed is not None or active is None else active


def _variable_to_tensor(leaf):
    return tf.convert_to_tensor(leaf) if isinstance(leaf, tf.Variable) else leaf


def _split_tensors(structure):
    """Returns the tensors in a nested structure, and a function that puts others in their place."""
    leaves = tf.nest.flatten(structure, expand_composites=True)
    is_tensor = [isinstance(leaf, tf.Tensor) for leaf in leaves]

    def rebuild(tensors):
        remaining = iter(tensors)
        flat = [
            next(remaining) if replace else leaf
            for leaf, replace in zip(leaves, is_tensor, strict=True)
        ]
        return tf.nest.pack_sequence_as(structure, flat, expand_composites=True)

    return [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)], rebuild


def _pause_eager_tapes():
    """Keeps eager tapes from holding the intermediates of what runs inside."""
    return tf.init_scope() if tf.executing_eagerly() else contextlib.nullcontext()


def _capture_keras_call():
    """Returns a function that enters again the Keras layer call which is active now.

    Variables cast to the compute dtype, and layers know whether they train, only while the
    `__call__` of a layer is on the stack, and the backward pass runs after it has returned.
    """
    active = base_layer_utils.call_context()
    if not active.in_call:
        return contextlib.nullcontext
    layer, arguments = active.layer, active.call_context_args

    @contextlib.contextmanager
    def enter():
        dtype = layer.compute_dtype and tf.as_dtype(layer.compute_dtype)
        with (
            base_layer_utils.call_context().enter(
                layer, None, not tf.executing_eagerly(), arguments
            ),
            autocast_variable.enable_auto_cast_variables(dtype),
        ):
            yield

    return enter


def _vector_jacobian_product(run, inputs, variables, output_gradients):
    """Runs `run` on a tape and returns the gradients of `inputs` and of `variables`."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch([x for x in inputs if _is_differentiable(x)])
        tape.watch(variables)
        outputs = run()
    # The tape would take a missing gradient for a gradient of ones.
    given = [
        (y, dy)
        for y, dy in zip(outputs, output_gradients, strict=True)
        if dy is not None and _is_differentiable(y)
    ]
    gradients = tape.gradient(
        [y for y, _ in given],
        [*inputs, *variables],
        output_gradients=[dy for _, dy in given],
    )
    # tf.custom_gradient takes sparse gradients for variables only.
    input_gradients = [
        tf.convert_to_tensor(dx) if isinstance(dx, tf.IndexedSlices) else dx
        for dx in gradients[: len(inputs)]
    ]
    return input_gradients, gradients[len(inputs) :]


def _bind_captures(graph):
    """Returns a function that calls its argument with what `graph` has captured.

    The gradient of a `tf.while_loop` or `tf.cond` may refer to variables only through the loop or
    branch it is the gradient of, and not anew, as the reads of a recomputation do.
    """
    if not getattr(graph, "is_control_flow_graph", False):
        return lambda f: f()
    inner = {id(outer): inner for outer, inner in graph.captures}

    def call(f):
        function = tf.function(f).get_concrete_function()
        function.set_external_captures([inner.get(id(x), x) for x in function.captured_inputs])
        return function()

    return call


def _is_differentiable(x):
    return x.dtype.is_floating or x.dtype.is_complex


# --------------------------------------------------------------------------------------
# Order
# --------------------------------------------------------------------------------------


def _after(gradients, tensors):
    """Returns `tensors`, bit for bit, in copies that cannot be computed before `gradients` are.

    Graph executors and XLA are free to run the recomputation right after the forward pass, and XLA
    merges it with the forward pass if its inputs are the same. XLA drops control dependencies, and
    on a CPU expands its optimization barrier before it merges, so the copies depend on the data: a
    zero that only the bits of the gradients determine is or-ed into the bits of each tensor. Being
    integer arithmetic this is exact for every value, non-finite ones included. Eager code runs in
    order by itself.
    """
    if tf.executing_eagerly():
        return [tf.identity(x) for x in tensors]
    never = _never([dy for dy in gradients if dy is not None])
    return [_copy_after(never)(x) for x in tensors]


def _never(gradients):
    """Returns a scalar that is False, which no compiler knows before `gradients` are computed."""
    never = tf.constant(False)
    for dy in gradients:
        if dy.dtype.is_complex:
            dy = tf.math.real(dy)
        if dy.dtype not in _BITS:
            continue
        # One element suffices, and an empty gradient has none.
        bits = tf.bitcast(tf.reshape(dy, [-1])[:1], _BITS[dy.dtype])
        # A word has no more than 64 bits, but compilers do not track the range of a bit count.
        count = tf.raw_ops.PopulationCount(x=bits)
        never = tf.logical_or(never, tf.reduce_any(count > 64))
    return never


_BITS = {
    tf.float16: tf.uint16,
    tf.bfloat16: tf.uint16,
    tf.float32: tf.uint32,
    tf.float64: tf.uint64,
}


def _copy_after(never):
    @tf.custom_gradient
    def copy(x):
        return _or_bits(x, never), lambda dx: dx

    return copy


def _or_bits(x, bit):
    """Returns `x` with its bits or-ed with the boolean scalar `bit`."""
    if x.dtype == tf.bool:
        return tf.logical_or(x, bit)
    if x.dtype.is_integer and not x.dtype.is_quantized:
        return tf.bitwise.bitwise_or(x, tf.cast(bit, x.dtype))
    if x.dtype.is_complex:
        return tf.complex(_or_bits(tf.math.real(x), bit), _or_bits(tf.math.imag(x), bit))
    if x.dtype in _BITS:
        return tf.bitcast(_or_bits(tf.bitcast(x, _BITS[x.dtype]), bit), x.dtype)
    # Strings and the like, which XLA does not compile.
    with tf.control_dependencies([bit]):
        return tf.identity(x)


# --------------------------------------------------------------------------------------
# Layers
# --------------------------------------------------------------------------------------


def add_gradient_recomputation(layer_class):
    """Returns a subclass, of the same name, whose `call` is recomputed in the backward pass.

    Variables, configuration and the signature of `call` stay those of `layer_class`. A layer makes
    its variables in `build`, which Keras runs before `call`.
    """

    def call(self, *args, **kwargs):
        return recompute_grad(functools.partial(layer_class.call, self))(*args, **kwargs)

    # Keras reads the signature to decide whether to pass `training` and `mask`.
    call.__signature__ = inspect.signature(layer_class.call)
    return type(
        layer_class.__name__,
        (layer_class,),
        {"call": call, "__module__": layer_class.__module__, "__doc__": layer_class.__doc__},
    )


@keras.saving.register_keras_serializable("bigbird")
class Recompute(keras.layers.Wrapper):
    """Wraps any layer or functional block so that it is recomputed in the backward pass.

        block = keras.Sequential([keras.layers.Dense(512, "relu"), keras.layers.Dense(64)])
        outputs = Recompute(block)(inputs)

    Random layers inside must be `RecomputingDropout`: any other draws anew in the recomputation.

    Args:
      layer: A `keras.layers.Layer` or `keras.Model`.
      **kwargs: Of `keras.layers.Layer`.

    Raises:
      ValueError: If `layer` is not a layer.
    """

    def __init__(self, layer, **kwargs):
        super().__init__(layer, **kwargs)
        self.supports_masking = layer.supports_masking
        self._layer_takes_mask = "mask" in inspect.signature(layer.call).parameters

    def call(self, inputs, *args, training=None, mask=None, **kwargs):
        if self._layer_takes_mask:
            kwargs["mask"] = mask
        return recompute_grad(self.layer)(inputs, *args, training=training, **kwargs)

    def compute_mask(self, inputs, mask=None):
        return self.layer.compute_mask(inputs, mask)

    def compute_output_shape(self, input_shape):
        return self.layer.compute_output_shape(input_shape)
