"""Planned memory of a computation: what XLA would allocate, found without running anything."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes that XLA assigns to one compiled computation.

    Attributes:
      argument_bytes: Inputs: tensors passed and variables read.
      output_bytes: Results, and new values of variables written, where they do not share the
        memory of an argument.
      temporary_bytes: Everything in between, after XLA has let buffers share memory.
      total_bytes: All of it, constants in the program included.
    """

    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    total_bytes: int


def planned_memory(fn, *tensor_specs):
    """Compiles `fn` with XLA and returns the sizes in its buffer assignment.

    Nothing is allocated or run, so shapes may be far larger than the machine. The numbers are the
    plan for the device that TensorFlow compiles for here; they leave out what lives outside the
    computation (optimizer state that it does not touch, input pipelines, the runtime itself).

        step = lambda x: tf.reduce_sum(tf.matmul(x, x, transpose_b=True))
        planned_memory(step, tf.TensorSpec([1 << 20, 64])).temporary_bytes

    Args:
      fn: Function or `tf.function` of tensors.
      *tensor_specs: `tf.TensorSpec` of each argument, shapes fully known.

    Returns:
      MemoryPlan.

    Raises:
      ValueError: If a shape is not fully known or XLA cannot compile `fn`.
    """
    for spec in tensor_specs:
        if not spec.shape.is_fully_defined():
            raise ValueError(
                f"Memory can be planned for known shapes only; received {spec}. "
                "Give every dimension a size."
            )
    compiled = tf.function(fn, jit_compile=True)
    try:
        compiler_ir = compiled.experimental_get_compiler_ir(*tensor_specs)
        serialized = compiler_ir(stage="optimized_hlo_proto_serialized")
    except (TypeError, ValueError, tf.errors.OpError) as error:
        raise ValueError(
            "XLA cannot compile the function, so its memory cannot be planned. Remove what has no "
            f"XLA kernel, such as strings, and shapes that depend on values. XLA says: {error}"
        ) from error
    allocations = hlo_pb2.HloProto.FromString(serialized).buffer_assignment.buffer_allocations
    sizes = {"argument": 0, "output": 0, "temporary": 0, "constant": 0}
    for allocation in allocations:
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
