"""Opens whatever checkpoint is at a path: tensors by name, in a naming of `name_maps`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np
import tensorflow as tf

from bigbird.core.callbacks import CHECKPOINT_DIRECTORY, checkpoint_steps
from bigbird.core.name_maps import HF_BARE, HF_BUFFERS, HF_REPEATED
from bigbird.core.safetensors_files import (
    CheckpointError,
    SafetensorsDirectory,
    is_safetensors_directory,
)
from bigbird.core.tf_checkpoint_files import TfCheckpoint


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


class HuggingFaceTensors:
    """A directory of Hugging Face's layout, under the names of `name_maps`.

    The files of a model without heads lack the first part of the names; a weight that two modules
    share may be there twice; and there may be constants among the weights.
    """

    naming = "hf"

    def __init__(self, directory: str):
        """Opens the directory.

        Raises:
          CheckpointError: as `SafetensorsDirectory`; where two copies of a weight differ.
        """
        self.description = f"Hugging Face safetensors: {directory}"
        self.directory = directory
        self._files = SafetensorsDirectory(directory)
        stored = self._full_names()
        for buffer in HF_BUFFERS:
            stored.pop(buffer, None)
        self._stored = stored
        self._drop_repeated()
        self.shapes = {name: self._files.shapes[key] for name, key in stored.items()}

    def _full_names(self) -> dict[str, str]:
        names = self._files.shapes
        for bare, prefix in HF_BARE:
            if any(name.startswith(bare) for name in names):
                return {prefix + name: name for name in names}
        return {name: name for name in names}

    def _drop_repeated(self) -> None:
        for repeated, name in HF_REPEATED.items():
            if repeated in self._stored and name in self._stored:
                if not np.array_equal(self.read(repeated), self.read(name)):
                    raise CheckpointError(
                        f"{self.directory}: {repeated} differs from {name}; our models have one "
                        "variable for both (tie_word_embeddings)."
                    )
                del self._stored[repeated]

    def check_types(self, names: Iterable[str]) -> None:
        """See `TensorSource`."""
        self._files.check_types(self._stored[name] for name in names)

    def read(self, name: str) -> np.ndarray:
        """See `TensorSource`."""
        return self._files.read(self._stored[name])

    def __enter__(self):
        return self

    def __exit__(self, *unused_error):
        self._files.close()
