"""Directories in Hugging Face's layout: weights under the names of `name_maps`, both ways.

Their files hold a little more than our models have variables for: second names of a weight, zeros
and constants. Reading makes sure that these say nothing else, and writing adds them again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from bigbird.core.callbacks import write_atomically
from bigbird.core.checkpoint_formats.name_maps import HF_BARE, HF_BUFFERS, HF_REPEATED, HF_ZEROS
from bigbird.core.checkpoint_formats.pretrained_config import CONFIG_FILE, VOCABULARY_FILE
from bigbird.core.checkpoint_formats.safetensors_files import (
    SINGLE_FILE,
    CheckpointError,
    SafetensorsDirectory,
    write_safetensors,
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
          CheckpointError: as `SafetensorsDirectory`.
        """
        self.description = f"Hugging Face safetensors: {directory}"
        self.directory = directory
        self._files = SafetensorsDirectory(directory)
        self._stored = self._full_names()
        for buffer in HF_BUFFERS:
            self._stored.pop(buffer, None)
        self.shapes = {name: self._files.shapes[key] for name, key in self._stored.items()}

    def _full_names(self) -> dict[str, str]:
        names = self._files.shapes
        for bare, prefix in HF_BARE:
            if any(name.startswith(bare) for name in names):
                return {prefix + name: name for name in names}
        return {name: name for name in names}

    def drop_implied(self, wanted: Container[str]) -> None:
        """See `tensor_sources.TensorSource`."""
        for repeated, name in HF_REPEATED.items():
            if repeated in self.shapes and repeated not in wanted and name in self.shapes:
                if not np.array_equal(self.read(repeated), self.read(name)):
                    raise CheckpointError(
                        f"{self.directory}: {repeated} differs from {name}, and the model has one "
                        "variable for both."
                    )
                del self.shapes[repeated]
        for name in HF_ZEROS:
            if name in self.shapes:
                if np.any(self.read(name)):
                    raise CheckpointError(
                        f"{self.directory}: {name} is not zero, which is not supported."
                    )
                del self.shapes[name]

    def check_types(self, names: Iterable[str]) -> None:
        """See `tensor_sources.TensorSource`."""
        self._files.check_types(self._stored[name] for name in names)

    def read(self, name: str) -> np.ndarray:
        """See `tensor_sources.TensorSource`."""
        return self._files.read(self._stored[name])

    def __enter__(self):
        return self

    def __exit__(self, *unused_error):
        self._files.close()


def write_pretrained(
    directory: str,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    settings: Mapping[str, Any],
    type_code: str,
    vocabulary: str | None,
) -> None:
    """Writes a directory in Hugging Face's layout; each file appears when it is whole.

    Args:
      directory: made where it does not exist; other files in it stay.
      shapes: `{name: shape}` of the weights.
      read: gives a weight.
      settings: content of `config.json`.
      type_code: how weights are stored, a key of `safetensors_files.FLOAT_TYPES`.
      vocabulary: SentencePiece model file to put beside the weights.
    """
    shapes = dict(shapes)
    copies = {}
    if "model.shared.weight" in shapes:
        encoder, decoder = (
            f"model.{part}.embed_positions.weight" for part in ("encoder", "decoder")
        )
        if decoder not in shapes:
            copies[decoder] = encoder
            shapes[decoder] = shapes[encoder]
        shapes["final_logits_bias"] = (1, shapes["model.shared.weight"][0])

    def read_any(name):
        if name in HF_ZEROS:
            return np.zeros(shapes[name], np.float32)
        return read(copies.get(name, name))

    os.makedirs(directory, exist_ok=True)
    ordered = {name: shapes[name] for name in sorted(shapes)}
    write_safetensors(os.path.join(directory, SINGLE_FILE), ordered, read_any, type_code)
    write_settings(directory, settings, vocabulary)


def write_settings(directory: str, settings: Mapping[str, Any], vocabulary: str | None) -> None:
    """Writes `config.json` and, where a vocabulary is given, `spiece.model`."""
    text = json.dumps(settings, indent=2, sort_keys=True)
    write_atomically(os.path.join(directory, CONFIG_FILE), text)
    if vocabulary is not None:
        target = os.path.join(directory, VOCABULARY_FILE)
        tf.io.gfile.copy(vocabulary, f"{target}.tmp", overwrite=True)
        tf.io.gfile.rename(f"{target}.tmp", target, overwrite=True)
