"""Opens whatever checkpoint is at a path: tensors by name, in a naming of `name_maps`."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping
from typing import Protocol

import numpy as np
import tensorflow as tf

from bigbird.core.callbacks import CHECKPOINT_DIRECTORY, checkpoint_steps
from bigbird.core.checkpoint_formats.huggingface_files import HuggingFaceTensors
from bigbird.core.checkpoint_formats.safetensors_files import (
    CheckpointError,
    SafetensorsDirectory,
    is_safetensors_directory,
)
from bigbird.core.checkpoint_formats.tf_checkpoint_files import TfCheckpoint


class TensorSource(Protocol):
    """Tensors of a checkpoint by name; a context manager.

    Attributes:
      description: what the checkpoint was recognised as, and where it is.
      naming: whose names these are, one of `name_maps.NAMINGS`.
      shapes: `{name: shape}`.
    """

    description: str
    naming: str
    shapes: Mapping[str, tuple[int, ...]]

    def drop_implied(self, wanted: Container[str]) -> None:
        """Leaves out tensors that tell nothing new and that nobody wants.

        Raises:
          CheckpointError: where such a tensor does tell something.
        """

    def check_types(self, names: Iterable[str]) -> None:
        """Raises a `CheckpointError` where a tensor has a type that no weight has."""

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor in the type it is stored in."""


def open_tensors(path: str) -> TensorSource:
    """Opens a checkpoint of any kind.

    Args:
      path: a 2021 checkpoint (`…/model.ckpt-0`, or a directory with a `checkpoint` file), a
        directory in Hugging Face's layout, the output directory of a training run (its newest
        checkpoint), one of its checkpoints, or a SavedModel of ours.

    Raises:
      CheckpointError: where there is none of these, or it cannot be read.
    """
    if is_safetensors_directory(path):
        return HuggingFaceTensors(path)
    kind, prefix = _find_tf_checkpoint(path)
    return TfCheckpoint(prefix, kind)


def _find_tf_checkpoint(path: str) -> tuple[str, str]:
    """Returns what a path with a TensorFlow checkpoint is, and the prefix of its files."""
    if tf.io.gfile.exists(f"{path}.index"):
        return "TensorFlow checkpoint", path
    if tf.io.gfile.exists(os.path.join(path, "saved_model.pb")):
        return "SavedModel", os.path.join(path, "variables", "variables")
    if tf.io.gfile.exists(os.path.join(path, "ckpt.index")):
        return "Checkpoint of a training run", os.path.join(path, "ckpt")
    for directory in (os.path.join(path, CHECKPOINT_DIRECTORY), path):
        steps = checkpoint_steps(directory)
        if steps:
            prefix = os.path.join(directory, f"step_{steps[-1]}", "ckpt")
            return f"Training run, step {steps[-1]}", prefix
    prefix = tf.train.latest_checkpoint(path) if tf.io.gfile.isdir(path) else None
    if prefix is not None:
        return "TensorFlow checkpoint", prefix
    if tf.io.gfile.isdir(path):
        # It has no weights we read; this says what it has.
        SafetensorsDirectory(path)
    raise CheckpointError(
        f"init_checkpoint={path!r}: no checkpoint there; expected a 2021 checkpoint (the prefix of "
        "a pair of files .index and .data-00000-of-00001, such as DIRECTORY/model.ckpt-0), a "
        "directory with config.json and model.safetensors, the output directory of a training run, "
        "or a SavedModel."
    )
