"""Rematerialization: gradients that recompute a function's intermediates instead of keeping them.

`recompute_grad(f)` computes what `f` computes. Its gradient keeps only the arguments of the call
and runs `f` a second time in the backward pass, so that a stack of layers holds the activations of
one layer at a time (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016,
arXiv:1604.06174, section 4). The second run has to repeat the first exactly, so

* dropout masks come from seeds that a `RecomputeContext` derives, not from stateful generators;
* Keras's dtype casting and training mode, which end with a layer's `__call__`, are entered again;
* the arguments, bit for bit the same, wait for the incoming gradient: a compiler can neither merge
  the second run with the first nor start it early.

Read `recompute_grad` first, then `after`. Axis letters: none; everything here is shape agnostic.
"""

from __future__ import annotations

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

# Named, because the default differs between compiled and uncompiled code, and a dropout mask may
# be drawn once in each.
_GENERATOR = "philox"


# ------------------------------------------------------------------------------ seeds


class RecomputeContext:
    """Gives every dropout of a forward pass, and its recomputation, a seed of its own.

    The k-th dropout with the salt s draws its mask from fold_in(seed, crc32("s:k")). A training
    step enters the context around its forward pass with a seed made of the run's seed and the step,
    inside the `tf.function` that runs the step. Masks then differ between layers and steps, and
    depend on neither retracing nor compilation.

        with RecomputeContext(seed=tf.stack([run_seed, step])):
            loss = loss_fn(labels, model(features, training=True))

    Args:
      seed: Integer scalar or pair. None draws one from TensorFlow's global generator.
      is_recomputing: Whether what runs inside is the second run of a recomputed function.
      uses: Counts, by salt, of the dropouts to continue after. None starts at the first.

    Attributes:
      seed: int32 tensor [2].
      is_recomputing: As given.

    Raises:
      ValueError: If `seed` is not an integer scalar or pair.
    """

    def __init__(self, seed=None, is_recomputing=False, uses=None):
        self.seed = _draw_seed() if seed is None else _as_seed(seed)
        self.is_recomputing = is_recomputing
        self._uses = collections.Counter(uses)

    def __enter__(self):
        _active.contexts.append(self)
        return self

    def __exit__(self, *exc_info):
        _active.contexts.pop()

    def next_seed(self, salt):
        """Returns the int32 seed [2] of the next dropout with `salt`, an integer or a string."""
        use = self._uses[salt]
        self._uses[salt] += 1
        data = zlib.crc32(f"{salt}:{use}".encode()) & 0x7FFFFFFF
        return tf.random.fold_in(self.seed, data, alg=_GENERATOR)

    def uses(self):
        """Returns a copy of the counts, by salt, of the dropouts so far."""
        return self._uses.copy()


class _ActiveContexts(threading.local):
    def __init__(self):
        self.contexts = []
        self.recomputed_functions = 0


_active = _ActiveContexts()


def get_recompute_context():
    """Returns the innermost active `RecomputeContext` of this thread, or None."""
    return _active.contexts[-1] if _active.contexts else None


def is_recomputed():
    """Returns whether this runs inside a recomputed function, in either of its runs.

    What a gradient keeps there lives only while the gradient of the function is computed.
    """
    return _active.recomputed_functions > 0


@contextlib.contextmanager
def _inside_recomputed_function():
    _active.recomputed_functions += 1
    try:
        yield
    finally:
        _active.recomputed_functions -= 1


def _draw_seed():
    return tf.random.uniform([2], tf.int32.min, tf.int32.max, tf.int32)


def _as_seed(seed):
    seed = tf.convert_to_tensor(seed)
    is_scalar = seed.shape.rank == 0
    if not seed.dtype.is_integer or not (is_scalar or seed.shape.is_compatible_with([2])):
        raise ValueError(
            "A seed must be an integer scalar or an integer tensor of shape [2]; received "
            f"{seed.dtype.name} of shape {seed.shape}. Pass for example tf.stack([run_seed, step])."
        )
    seed = tf.cast(seed, tf.int32)
    return tf.stack([seed, 0]) if is_scalar else seed


# ------------------------------------------------------------------------------ dropout


def stateless_dropout(x, rate, seed, noise_shape=None, name=None):
    """Sets elements to zero with probability `rate` and scales the others to keep the mean.

    y = x / (1 - rate) where u >= rate, else 0; u, uniform in [0, 1), is a function of `seed` alone,
    the same in eager, graph and compiled code.

    Args:
      x: Floating tensor.
      rate: Number in [0, 1).
      seed: Integer tensor [2].
      noise_shape: Shape of u, broadcast to that of `x`; None entries take the size of `x`.
      name: Name of the operation.

    Returns:
      Tensor of the shape and dtype of `x`.

    Raises:
      ValueError: If `x` is not floating, or `rate`, `seed` or `noise_shape` does not fit.

    Source: Srivastava et al., "Dropout", JMLR 15, 2014, section 4.
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
        # All that a draw needs is its seed: without a reason to wait the draws of all layers would
        # be made at once, and first.
        (seed,) = after([x], [_as_seed(seed)])
        # Comparing integers drops exactly round(rate * 2**32) of the 2**32 values of a draw.
        draws = tf.random.stateless_uniform(
            _mask_shape(x, noise_shape), seed, None, None, tf.uint32, alg=_GENERATOR
        )
        keep = draws >= tf.constant(round(rate * 2**32), tf.uint32)
        # In 16 bits the rounded scale would shift the mean.
        scale_dtype = tf.float32 if x.dtype.size < 4 else x.dtype
        scaled = tf.cast(x, scale_dtype) * tf.constant(1 / (1 - rate), scale_dtype)
        return tf.where(keep, tf.cast(scaled, x.dtype), tf.zeros([], x.dtype))


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

    The seed comes from the active `RecomputeContext`; where there is none, each call draws one from
    TensorFlow's global generator.

    Args:
      rate: Number in [0, 1), the probability of dropping an element.
      noise_shape: As in `stateless_dropout`.
      seed: Integer that sets this layer's masks apart within a context. None uses its name.
      force_recomputation: Whether a call outside any context is an error.
      **kwargs: As in `keras.layers.Layer`.

    Raises:
      ValueError: If `rate` is out of range, or at a forced call outside any context.
    """

    def __init__(self, rate, noise_shape=None, seed=None, force_recomputation=False, **kwargs):
        _check_rate(rate)
        super().__init__(**kwargs)
        self.rate = rate
        self.noise_shape = noise_shape
        self.seed = seed
        self.force_recomputation = force_recomputation
        self.supports_masking = True
        self.built = True  # there is nothing to build

    def call(self, inputs, training=None):
        def dropped():
            return stateless_dropout(inputs, self.rate, self.next_seed(), self.noise_shape)

        return self.choose(training, dropped, lambda: tf.identity(inputs))

    def choose(self, training, with_dropout, without):
        """Calls one of two functions: `with_dropout` in training, unless the rate is 0."""
        training = False if training is None or self.rate == 0 else training
        return tf.__internal__.smart_cond.smart_cond(training, with_dropout, without)

    def next_seed(self):
        """Returns the int32 seed [2] of this layer's next mask.

        Raises:
          ValueError: outside any context, if `force_recomputation`.
        """
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
        # Keras numbers unnamed layers by what else the process has built, which says nothing about
        # this model. Layers left with one name are told apart by the order of their calls.
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


# ------------------------------------------------------------------------------ recomputation


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
    active = get_recompute_context()
    context = active if seed is None and active else RecomputeContext(seed)
    uses = context.uses()
    # Copies in the graph of this loop or branch, if any: its gradient can refer to nothing else.
    *tensors, seed = [tf.identity(x) for x in [*tensors, context.seed]]
    enter_keras_call = _capture_keras_call()
    rebuild_outputs = None

    def run(tensors):
        args, kwargs = rebuild_arguments(tensors)
        with _inside_recomputed_function():
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
            *inputs, late_seed = after(output_gradients, [*tensors, seed])
            with enter_keras_call(), RecomputeContext(late_seed, is_recomputing=True, uses=uses):
                input_gradients, variable_gradients = bind(
                    lambda: _vector_jacobian_product(
                        lambda: run(inputs)[0], inputs, variables, output_gradients
                    )
                )
            return (input_gradients, variable_gradients) if variables else input_gradients

        return outputs, backward

    outputs = checkpoint(*tensors)
    return rebuild_outputs(outputs)


def _variable_to_tensor(leaf):
    return tf.convert_to_tensor(leaf) if isinstance(leaf, tf.Variable) else leaf


def _split_tensors(structure):
    """Returns the tensors in a nested structure, and a function that puts others in their place."""
    leaves = tf.nest.flatten(structure, expand_composites=True)

    def rebuild(tensors):
        remaining = iter(tensors)
        replaced = [next(remaining) if isinstance(x, tf.Tensor) else x for x in leaves]
        return tf.nest.pack_sequence_as(structure, replaced, expand_composites=True)

    return [x for x in leaves if isinstance(x, tf.Tensor)], rebuild


def _pause_eager_tapes():
    """Keeps eager tapes from holding the intermediates of what runs inside."""
    return tf.init_scope() if tf.executing_eagerly() else contextlib.nullcontext()


def _capture_keras_call():
    """Returns a function that enters again the Keras layer call which is active now.

    Only while the `__call__` of a layer is on the stack are variables cast to its compute dtype,
    and only then do the layers inside know whether they train.
    """
    call = base_layer_utils.call_context()
    if not call.in_call:
        return contextlib.nullcontext
    layer, arguments = call.layer, call.call_context_args

    @contextlib.contextmanager
    def enter():
        again = base_layer_utils.call_context().enter(
            layer,
            inputs=None,
            build_graph=not tf.executing_eagerly(),
            call_context_args=arguments,
        )
        compute_dtype = layer.compute_dtype and tf.as_dtype(layer.compute_dtype)
        with again, autocast_variable.enable_auto_cast_variables(compute_dtype):
            yield

    return enter


def _vector_jacobian_product(run, inputs, variables, output_gradients):
    """Runs `run` on a tape and returns the gradients of `inputs` and of `variables`."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch([x for x in inputs if _is_differentiable(x)])
        tape.watch(variables)
        outputs = run()
    # The tape takes a missing gradient for a gradient of ones.
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


def _is_differentiable(x):
    return x.dtype.is_floating or x.dtype.is_complex


def _bind_captures(graph):
    """Returns a function that calls its argument with what `graph` has captured.

    The gradient of a `tf.while_loop` or `tf.cond` can refer to a variable only as the loop or
    branch has captured it, not by capturing it again, as reading it in a recomputation does.
    """
    if not getattr(graph, "is_control_flow_graph", False):
        return lambda f: f()
    captures = {id(outer): inner for outer, inner in graph.captures}

    def call(f):
        function = tf.function(f).get_concrete_function()
        function.set_external_captures([captures.get(id(x), x) for x in function.captured_inputs])
        return function()

    return call


# ------------------------------------------------------------------------------ order


def after(earlier, tensors):
    """Returns copies of `tensors`, bit for bit, that cannot be computed before `earlier` are.

    A graph executor may run a recomputation right after the forward pass, and XLA merges the two
    if their inputs are the same. XLA drops control dependencies and, on a CPU, expands its
    optimization barrier before it merges, so the copies depend on data: into the bits of each
    tensor is or-ed a zero that only the bits of the earlier tensors determine. Being integer
    arithmetic this is exact for all values, non-finite ones included, compiled or not. Eager code
    is in order by itself.

    Args:
      earlier: tensors, such as incoming gradients; None and those that are neither
        floating nor complex are ignored.
      tensors: tensors of any dtypes.
    """
    if tf.executing_eagerly():
        return [tf.identity(x) for x in tensors]
    never = _never(earlier)

    @tf.custom_gradient
    def copy(x):
        return _or_bits(x, never), lambda dx: dx

    return [copy(x) for x in tensors]


_BITS = {
    tf.float16: tf.uint16,
    tf.bfloat16: tf.uint16,
    tf.float32: tf.uint32,
    tf.float64: tf.uint64,
}


def _never(tensors):
    """Returns a boolean scalar, False, that a compiler learns only by computing `tensors`."""
    never = tf.constant(False)
    for x in tensors:
        if x is None or not _is_differentiable(x):
            continue
        if x.dtype.is_complex:
            x = tf.math.real(x)
        # One element waits for all, and an empty tensor has none.
        bits = tf.bitcast(tf.reshape(x, [-1])[:1], _BITS[x.dtype])
        # No word has more than 64 bits, but compilers do not track the range of a bit count.
        count = tf.raw_ops.PopulationCount(x=bits)
        never = tf.logical_or(never, tf.reduce_any(count > 64))
    return never


def _or_bits(x, bit):
    """Returns `x` with its bits or-ed with the boolean scalar `bit`."""
    if x.dtype == tf.bool:
        return tf.logical_or(x, bit)
    if x.dtype.is_integer and not x.dtype.is_quantized:
        return tf.bitwise.bitwise_or(x, tf.cast(bit, x.dtype))
    if x.dtype in _BITS:
        return tf.bitcast(_or_bits(tf.bitcast(x, _BITS[x.dtype]), bit), x.dtype)
    if x.dtype.is_complex:
        return tf.complex(_or_bits(tf.math.real(x), bit), _or_bits(tf.math.imag(x), bit))
    # Strings and other dtypes without bits; XLA compiles none of them.
    with tf.control_dependencies([bit]):
        return tf.identity(x)


# ------------------------------------------------------------------------------ layers


def add_gradient_recomputation(layer_class):
    """Returns a subclass, of the same name, whose `call` is recomputed in the backward pass.

    Variables, configuration and call signature stay those of `layer_class`. Random layers inside
    must be `RecomputingDropout`.

    Args:
      layer_class: Subclass of `keras.layers.Layer`.

    Returns:
      Subclass of `layer_class`. Building it raises ValueError if it contains a layer that cannot be
      recomputed.
    """

    def build(self, input_shape):
        layer_class.build(self, input_shape)
        _check_recomputable(self)

    def call(self, *args, **kwargs):
        return recompute_grad(functools.partial(layer_class.call, self))(*args, **kwargs)

    # Keras reads the signature to decide whether to pass `training` and `mask`.
    call.__signature__ = inspect.signature(layer_class.call)
    members = {
        "build": build,
        "call": call,
        "__doc__": layer_class.__doc__,
        "__module__": layer_class.__module__,
    }
    return type(layer_class.__name__, (layer_class,), members)


@keras.saving.register_keras_serializable("bigbird")
class Recompute(keras.layers.Wrapper):
    """Recomputes any layer, or functional block of layers, in the backward pass.

        block = keras.Sequential([keras.layers.Dense(512, "relu"), keras.layers.Dense(64)])
        outputs = Recompute(block)(inputs)

    Random layers inside must be `RecomputingDropout`. A `BatchNormalization` inside updates its
    moving averages in both runs, as if its momentum were squared; gradients are not affected.

    Args:
      layer: A `keras.layers.Layer` or `keras.Model`.
      **kwargs: As in `keras.layers.Layer`.

    Raises:
      ValueError: If `layer` is not a layer or, when built, contains one that cannot be recomputed.
    """

    def __init__(self, layer, **kwargs):
        super().__init__(layer, **kwargs)
        self.supports_masking = layer.supports_masking
        self._layer_takes_mask = "mask" in inspect.signature(layer.call).parameters

    def build(self, input_shape=None):
        super().build(input_shape)
        _check_recomputable(self.layer)

    def call(self, inputs, *args, training=None, mask=None, **kwargs):
        if self._layer_takes_mask:
            kwargs["mask"] = mask
        return recompute_grad(self.layer)(inputs, *args, training=training, **kwargs)

    def compute_mask(self, inputs, mask=None):
        return self.layer.compute_mask(inputs, mask)

    def compute_output_shape(self, input_shape):
        return self.layer.compute_output_shape(input_shape)


def _check_recomputable(layer):
    for part in (layer, *layer.submodules):
        if _draws_anew(part):
            raise ValueError(
                f"Layer '{part.name}' ({type(part).__name__}) inside '{layer.name}' would draw "
                "other random numbers when it is recomputed. Use RecomputingDropout."
            )
        if getattr(part, "activity_regularizer", None) is not None:
            raise ValueError(
                f"Layer '{part.name}' inside '{layer.name}' has an activity regularizer, a loss "
                "that recomputation cannot differentiate. Add the loss to the layer's outputs."
            )


def _draws_anew(layer):
    if not isinstance(layer, keras.__internal__.layers.BaseRandomLayer):
        return False
    # Recurrent cells are random layers by type even where they drop nothing.
    names = ("rate", "stddev", "dropout", "recurrent_dropout")
    strengths = [getattr(layer, name) for name in names if hasattr(layer, name)]
    return any(strengths) or not strengths
