"""TensorFlow checkpoints as tensors by variable name: those of 2021, our runs, and SavedModels.

A 2021 checkpoint stores variables under their names. A checkpoint of today stores them under paths
through objects (`model/bert/pooler/kernel/…`) and their names beside them; since our variables bear
the 2021 names, both give the same names here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Mapping

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

from bigbird.core.callbacks import write_atomically
from bigbird.core.checkpoint_formats.safetensors_files import CheckpointError

_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
# What TensorFlow raises for torn files.
_READ_ERRORS = (tf.errors.OpError, RuntimeError, IndexError)
# Slots and counters that optimizers leave beside the weights.
_OPTIMIZER_STATE = re.compile(
    r"(/(adam|adafactor|momentum|adagrad|lamb)[^/]*$)|(/(m|v|vr|vc)$)|(^(global_step|beta\d_power)$)",
    re.IGNORECASE,
)
_OPTIMIZER_OBJECT = re.compile(r"(^|/)optimizer/")


class TfCheckpoint:
    """The weights of a TensorFlow checkpoint by variable name.

    See `tensor_sources.TensorSource`. The state of optimizers is left out.
    """

    naming = "tf1"

    def __init__(self, prefix: str, kind: str = "TensorFlow checkpoint"):
        """Opens the pair of files `prefix`.index and `prefix`.data-….

        Raises:
          CheckpointError: where they cannot be read.
        """
        self.description = f"{kind}: {prefix}"
        self._prefix = prefix
        if not tf.io.gfile.exists(f"{prefix}.index"):
            raise CheckpointError(
                f"{prefix!r}: no checkpoint there; expected the prefix of a pair of files .index "
                "and .data-00000-of-00001, such as DIRECTORY/model.ckpt-0."
            )
        try:
            self._reader = tf.train.load_checkpoint(prefix)
            shapes = self._reader.get_variable_to_shape_map()
            self._keys = self._keys_by_name(shapes)
        except _READ_ERRORS as error:
            raise CheckpointError(f"{prefix!r} cannot be read: {error}") from error
        self.shapes = {name: tuple(shapes[key]) for name, key in self._keys.items()}

    def _keys_by_name(self, shapes: Mapping[str, list[int]]) -> dict[str, str]:
        if _OBJECT_GRAPH not in shapes:
            return {name: name for name in shapes if not _OPTIMIZER_STATE.search(name)}
        graph = TrackableObjectGraph.FromString(self._reader.get_tensor(_OBJECT_GRAPH))
        return {
            attribute.full_name: attribute.checkpoint_key
            for node in graph.nodes
            for attribute in node.attributes
            if attribute.checkpoint_key in shapes
            # Weights are named by their path in the model; counters and metrics are not.
            and "/" in attribute.full_name
            and not _OPTIMIZER_OBJECT.search(attribute.checkpoint_key)
        }

    def drop_implied(self, wanted: Container[str]) -> None:
        """See `tensor_sources.TensorSource`; there are none."""

    def check_types(self, names: Iterable[str]) -> None:
        """See `tensor_sources.TensorSource`."""
        types = self._reader.get_variable_to_dtype_map()
        for name in names:
            if not types[self._keys[name]].is_floating:
                raise CheckpointError(
                    f"{self._prefix!r}: {name} has the type {types[self._keys[name]].name}; "
                    "expected floating point."
                )

    def read(self, name: str) -> np.ndarray:
        """See `tensor_sources.TensorSource`."""
        try:
            return self._reader.get_tensor(self._keys[name])
        except _READ_ERRORS as error:
            raise CheckpointError(f"{self._prefix!r}: {name} cannot be read: {error}") from error

    def __enter__(self):
        return self

    def __exit__(self, *unused_error):
        pass


def write_tf1_checkpoint(prefix: str, tensors: Mapping[str, tf.Tensor]) -> None:
    """Writes tensors by name as TensorFlow 1 and the 2021 toolkit read them.

    A file `checkpoint` beside them names them as the directory's newest.
    """
    directory, name = os.path.split(prefix)
    tf.io.gfile.makedirs(directory or ".")
    tf.raw_ops.SaveV2(
        prefix=prefix,
        tensor_names=list(tensors),
        shape_and_slices=[""] * len(tensors),
        tensors=list(tensors.values()),
    )
    write_atomically(os.path.join(directory, "checkpoint"), f'model_checkpoint_path: "{name}"\n')
