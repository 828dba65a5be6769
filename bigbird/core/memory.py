"""Planned memory: what a training step would take, from XLA's own plan, without running it.

`planned_memory` compiles any function of tensors and adds up XLA's buffers. `plan_training` does it
for the training step of an encoder, `fitting_policy` chooses what to recompute so that the step
fits a budget, and the command prints a table of lengths, batches and policies:

    bigbird-plan-memory --lengths=4096,16384 --policies=none,full --memory_budget_gb=16
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import absl.flags
import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2

from bigbird.core.config import BigBirdConfig
from bigbird.core.modeling import BertModel
from bigbird.core.optimization import create_optimizer
from bigbird.core.recompute_grad import RecomputeContext

GIB = 2**30

# From no extra time to one extra forward pass.
POLICIES_BY_TIME = ("none", "attention", "every_n", "full")


# ------------------------------------------------------------------------------ any function


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes that XLA assigns to one compiled computation.

    Attributes:
      argument_bytes: inputs: tensors passed and variables read.
      output_bytes: results, and new values of variables, that do not reuse an argument's memory.
      temporary_bytes: all in between, after XLA has let buffers share memory.
      total_bytes: the sum, with the constants of the program.
    """

    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    total_bytes: int


def planned_memory(fn, *tensor_specs: tf.TensorSpec) -> MemoryPlan:
    """Compiles `fn` with XLA and returns the sizes in its buffer assignment.

    total = sum of the buffer allocations of the optimized program

    Nothing is allocated or run, so shapes may be far larger than the machine. It is the plan for
    the device that TensorFlow compiles for here, and leaves out what lives outside the computation:
    variables it does not use, input pipelines, the runtime itself.

    Example:
      >>> attend = lambda x: tf.reduce_sum(tf.matmul(x, x, transpose_b=True) ** 2)
      >>> planned_memory(attend, tf.TensorSpec([65536, 64])).argument_bytes
      16777216

    Args:
      fn: function, or `tf.function`, of tensors.
      *tensor_specs: `tf.TensorSpec` of each argument, every size known.

    Raises:
      ValueError: if a size is unknown, or XLA cannot compile `fn`.
    """
    for spec in tensor_specs:
        if not spec.shape.is_fully_defined():
            raise ValueError(
                f"Memory can be planned for known sizes only; received {spec}. "
                "Give every dimension a size."
            )

    @tf.function(jit_compile=True)
    def compiled(*tensors):
        return fn(*tensors)

    try:
        compiler_ir = compiled.experimental_get_compiler_ir(*tensor_specs)
        program = compiler_ir(stage="optimized_hlo_proto_serialized")
    except (TypeError, ValueError, tf.errors.OpError) as error:
        raise ValueError(
            "XLA cannot compile the function, so its memory cannot be planned. It has to take the "
            "tensors of the specs and use neither operations without an XLA kernel, such as those "
            f"on strings, nor shapes that depend on values. The compiler says: {error}"
        ) from error
    sizes = {"argument": 0, "output": 0, "temporary": 0, "constant": 0}
    for allocation in hlo_pb2.HloProto.FromString(program).buffer_assignment.buffer_allocations:
        sizes[_kind(allocation)] += allocation.size
    return MemoryPlan(
        argument_bytes=sizes["argument"],
        output_bytes=sizes["output"],
        temporary_bytes=sizes["temporary"],
        total_bytes=sum(sizes.values()),
    )


def _kind(allocation):
    if allocation.is_entry_computation_parameter:
        return "argument"
    if allocation.maybe_live_out:
        return "output"
    return "constant" if allocation.is_constant else "temporary"


# ------------------------------------------------------------------------------ training steps


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """Memory of a training step of an encoder.

    Attributes:
      step: XLA's plan for forward and backward pass; parameters are arguments, gradients outputs.
      parameters: number of trainable parameters.
      parameter_bytes: their size, part of `step`.
      optimizer_bytes: state of the optimizer, not part of `step`.
    """

    step: MemoryPlan
    parameters: int
    parameter_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        """The step and the optimizer's state."""
        return self.step.total_bytes + self.optimizer_bytes


def training_step(model):
    """Returns a function of (token ids, dropout seed): the loss and all gradients of an encoder.

    loss = mean(sequence_output²) + mean(pooled_output²)

    The loss stands for a task's head, which adds little to a long encoder.

    Args:
      model: a `BertModel`.
    """

    def step(input_ids, seed):
        with tf.GradientTape() as tape, RecomputeContext(seed):
            sequence_output, pooled_output = model(input_ids, training=True)
            loss = _mean_square(sequence_output) + _mean_square(pooled_output)
        return loss, tape.gradient(loss, model.trainable_variables)

    return step


def _mean_square(x):
    return tf.reduce_mean(tf.square(tf.cast(x, tf.float32)))


def plan_training(params, batch_size: int, optimizer: str = "AdamWeightDecay") -> TrainingPlan:
    """Plans the training step of an encoder on documents of `max_encoder_length` tokens.

    The parameters are allocated; activations, gradients and the optimizer's state are not.

    Args:
      params: a `BigBirdConfig` or a dict of the same keys, with a policy other than `auto`.
      batch_size: documents in a batch.
      optimizer: as in `optimization.create_optimizer`.

    Raises:
      ValueError: for a batch size below 1, or a config or optimizer that does not exist.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: expected at least 1.")
    model = BertModel(params)
    ids = tf.TensorSpec([batch_size, model.config.max_encoder_length], tf.int32)
    return plan_step(model, training_step(model), [ids], optimizer)


def plan_step(model, step, batch: Sequence[tf.TensorSpec], optimizer: str) -> TrainingPlan:
    """Plans the training step of any model.

    Args:
      model: a built model.
      step: function of the tensors of a batch and the dropout seed `[2]`: the loss, and the
        gradients of all trainable variables.
      batch: the tensors of a batch.
      optimizer: as in `optimization.create_optimizer`.
    """
    weights = model.trainable_variables
    return TrainingPlan(
        step=planned_memory(step, *batch, tf.TensorSpec([2], tf.int32)),
        parameters=sum(w.shape.num_elements() for w in weights),
        parameter_bytes=_size(weights),
        optimizer_bytes=_optimizer_bytes(optimizer, weights),
    )


def _optimizer_bytes(name, weights):
    # A graph's variables take memory only when a session makes them.
    with tf.Graph().as_default():
        optimizer = create_optimizer(name, learning_rate=0.1)
        optimizer.build(
            [tf.Variable(tf.zeros(w.shape, w.dtype), name=w.name[:-2]) for w in weights]
        )
        return _size(optimizer.variables)


def _size(variables):
    return sum(v.shape.num_elements() * v.dtype.size for v in variables)


def fitting_policy(
    params, batch_size: int, optimizer: str = "AdamWeightDecay", plan=None
) -> BigBirdConfig:
    """Returns the config with its `auto` policy resolved: the fastest that fits the budget.

    Policies are tried from no recomputation to all, until the plan stays within `memory_budget_gb`.
    A config with another policy is returned as it is.

    Args:
      params: a `BigBirdConfig` or a dict of the same keys.
      batch_size: documents in a batch.
      optimizer: as in `optimization.create_optimizer`.
      plan: function of config, batch size and optimizer that returns the `TrainingPlan` of a task's
        model; `plan_training`, an encoder's, where None.

    Raises:
      ValueError: if the budget is not set, or nothing meets it; says what the smallest plan needs.
    """
    config = BigBirdConfig.from_params(params)
    if config.checkpointing_policy != "auto":
        return config
    if config.memory_budget_gb is None:
        raise ValueError(
            "gradient_checkpointing_policy='auto' needs a budget: set --memory_budget_gb."
        )
    plan = plan or plan_training
    needed = {}
    for policy in POLICIES_BY_TIME:
        candidate = config.replace(gradient_checkpointing_policy=policy)
        needed[policy] = plan(candidate, batch_size, optimizer).total_bytes
        if needed[policy] <= config.memory_budget_gb * GIB:
            return candidate
    smallest = min(needed, key=needed.get)
    raise ValueError(
        f"Nothing fits memory_budget_gb={config.memory_budget_gb}: at batch size {batch_size} and "
        f"length {config.max_encoder_length} the smallest plan, {smallest}, needs "
        f"{needed[smallest] / GIB:.2f} GiB. Raise the budget, or lower --train_batch_size or "
        "--max_encoder_length."
    )


def largest_batch(total_bytes: Callable[[int], int], budget_bytes: float) -> int:
    """Returns the largest batch size whose bytes stay within a budget, 0 if not even one does.

    Memory grows almost in proportion to the batch, so a line through two plans gives a guess that
    further plans correct.

    Args:
      total_bytes: increasing function of the batch size.
      budget_bytes: bytes at most.
    """
    one, two = total_bytes(1), total_bytes(2)
    if one > budget_bytes:
        return 0
    batch = 1 + math.floor((budget_bytes - one) / (two - one))
    while total_bytes(batch) > budget_bytes:
        batch -= 1
    while total_bytes(batch + 1) <= budget_bytes:
        batch += 1
    return batch


# ------------------------------------------------------------------------------ command

EXPLANATION = """\
Planned is what XLA:CPU would allocate for one compiled step (forward and backward pass of the
encoder, all gradients returned) plus the state of the optimizer. It leaves out the head of a task,
the input pipeline and the runtime; a step that XLA does not compile may hold more."""


def run():
    """Entry of the installed command."""
    # Imported here because it defines flags, which users of `planned_memory` have no need of.
    from bigbird.core import flags

    flags.define_task_flags(
        data_dir=None,
        max_encoder_length=4096,
        substitute_newline=None,
        batch_size=1,
        optimizer="AdamWeightDecay",
        learning_rate=1e-5,
        num_train_steps=1,
        num_warmup_steps=0,
        save_checkpoints_steps=1,
    )
    absl.flags.DEFINE_list("lengths", [], "Lengths to plan; --max_encoder_length where empty.")
    absl.flags.DEFINE_list("batches", [], "Batch sizes to plan; --train_batch_size where empty.")
    absl.flags.DEFINE_list("policies", list(POLICIES_BY_TIME), "Checkpointing policies to plan.")
    absl.flags.DEFINE_string("plot", None, "Image file to draw the plans in.")
    flags.run(lambda _: _plan_flags(flags.model_config(), flags.FLAGS))


def _plan_flags(config, values):
    lengths = [int(length) for length in values.lengths] or [config.max_encoder_length]
    batches = [int(batch) for batch in values.batches] or [values.train_batch_size]

    @functools.cache
    def plan(length, batch, policy):
        planned = config.replace(
            max_encoder_length=length,
            max_position_embeddings=max(length, config.max_position_embeddings),
            gradient_checkpointing_policy=policy,
        )
        return plan_training(planned, batch, values.optimizer)

    print(EXPLANATION, end="\n\n")
    print(
        f"{'length':>8}{'batch':>7}  {'policy':<10}{'planned':>12}{'parameters':>14}{'state':>12}"
    )
    totals = {}
    for length, batch, policy in itertools.product(lengths, batches, values.policies):
        planned = plan(length, batch, policy)
        totals[length, batch, policy] = planned.total_bytes
        print(
            f"{length:>8}{batch:>7}  {policy:<10}{_size_text(planned.total_bytes):>12}"
            f"{planned.parameters:>14,}{_size_text(planned.optimizer_bytes):>12}",
            flush=True,
        )
    if config.memory_budget_gb is not None:
        print(f"\nLargest batch within {config.memory_budget_gb:g} GiB:")
        for length, policy in itertools.product(lengths, values.policies):
            batch = largest_batch(
                lambda batch, length=length, policy=policy: plan(length, batch, policy).total_bytes,
                config.memory_budget_gb * GIB,
            )
            print(f"{length:>8}{batch:>7}  {policy}", flush=True)
    if values.plot:
        _draw(totals, values.plot)


def _size_text(size):
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


def _draw(totals, path):
    # Imported here because only drawing needs it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    lines = dict.fromkeys((batch, policy) for _, batch, policy in totals)
    for batch, policy in lines:
        points = [
            (n, size / GIB) for (n, b, p), size in totals.items() if (b, p) == (batch, policy)
        ]
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=f"{policy}, batch {batch}")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens in a document", ylabel="planned GiB", title="Memory of a training step")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    run()
