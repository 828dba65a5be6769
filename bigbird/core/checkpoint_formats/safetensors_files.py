"""Directories of safetensors files, read and written tensor by tensor, nothing in them trusted.

A directory holds `model.safetensors`, or shards and `model.safetensors.index.json`, which names the
shard of every tensor. Files come from strangers: sizes are checked before anything is allocated,
names cannot lead out of the directory, links and special files are refused, and no pickle is read.

Source of the format: https://github.com/huggingface/safetensors, section Format of its README.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Far above those of any published model, and small enough to be parsed in 500 MB.
MAX_HEADER_BYTES = 16 * 2**20
MAX_JSON_BYTES = 8 * 2**20

# Codes of the format, and the types whose tensors can become weights.
FLOAT_TYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}

_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or does not fit the model."""


def is_safetensors_directory(path: str) -> bool:
    """Whether a directory has weights in this format."""
    return any(os.path.lexists(os.path.join(path, name)) for name in (SINGLE_FILE, INDEX_FILE))


def regular_file(directory: str, name: str) -> str:
    """Returns the path of a plain file in a directory.

    Raises:
      CheckpointError: where there is none, or something else: a link could lead anywhere, and a
        pipe could be read forever.
    """
    path = os.path.join(directory, name)
    try:
        mode = os.lstat(path).st_mode
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if stat.S_ISLNK(mode):
        raise CheckpointError(
            f"{path} is a symbolic link and is not followed: copy the directory with its files in "
            "place of the links (cp -rL)."
        )
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path}: expected a file.")
    return path


def read_json(directory: str, name: str) -> dict[str, Any]:
    """Reads a JSON object from a file of a directory.

    Raises:
      CheckpointError: where there is no such file, or no object in it.
    """
    path = regular_file(directory, name)
    with open(path, "rb") as file:
        text = file.read(MAX_JSON_BYTES + 1)
    if len(text) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} is larger than {MAX_JSON_BYTES} bytes.")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object; received {type(value).__name__}.")
    return value


class SafetensorsDirectory:
    """The tensors of a directory by name, each read from disk when it is asked for.

    Attributes:
      shapes: `{name: shape}` of every tensor.
    """

    def __init__(self, directory: str):
        """Opens the files and checks their headers.

        Raises:
          CheckpointError: where a file is missing, damaged or not what it should be.
        """
        self.directory = directory
        self._files = contextlib.ExitStack()
        self._file_of = {}
        self._types = {}
        self.shapes = {}
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._files.close)
            for file_name, wanted in self._tensors_by_file().items():
                self._open(file_name, wanted)
            on_error.pop_all()

    def close(self) -> None:
        """Closes the files."""
        self._files.close()

    def check_types(self, names: Iterable[str]) -> None:
        """Raises a `CheckpointError` where a tensor is no float32, bfloat16 or float16."""
        for name in names:
            if self._types[name] not in FLOAT_TYPES:
                raise CheckpointError(
                    f"{self.directory}: {name} has the type {self._types[name]}; expected "
                    f"{', '.join(FLOAT_TYPES)}."
                )

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor in the type it is stored in.

        Raises:
          CheckpointError: as `check_types`, and where reading fails.
        """
        self.check_types([name])
        try:
            return self._file_of[name].get_tensor(name)
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.directory}: {name} cannot be read: {error}") from error

    def _tensors_by_file(self) -> Mapping[str, set[str] | None]:
        """Returns which tensors to take from which file; None for all."""
        if os.path.lexists(os.path.join(self.directory, SINGLE_FILE)):
            return {SINGLE_FILE: None}
        if os.path.lexists(os.path.join(self.directory, INDEX_FILE)):
            return self._read_index()
        pickles = [n for n in _PICKLES if os.path.lexists(os.path.join(self.directory, n))]
        if pickles:
            raise CheckpointError(
                f"{self.directory} has its weights in {pickles[0]}, a pickle, which can run any "
                "program and is never read. Where you trust it, convert it with transformers: "
                "AutoModel.from_pretrained(…).save_pretrained(…)."
            )
        raise CheckpointError(f"{self.directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}.")

    def _read_index(self) -> dict[str, set[str]]:
        path = os.path.join(self.directory, INDEX_FILE)
        weight_map = read_json(self.directory, INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(
                f"{path}: expected weight_map, an object that gives the file of every tensor."
            )
        tensors_by_file = {}
        for tensor, file_name in weight_map.items():
            # A plain name: no folder, no way up, no drive, no file of another kind.
            plain = isinstance(file_name, str) and os.path.basename(file_name) == file_name
            if not plain or "\\" in file_name or not file_name.endswith(".safetensors"):
                raise CheckpointError(
                    f"{path}: {tensor!r:.80} is said to be in {file_name!r:.80}; expected the name "
                    "of a .safetensors file of the same directory."
                )
            tensors_by_file.setdefault(file_name, set()).add(tensor)
        return tensors_by_file

    def _open(self, file_name: str, wanted: set[str] | None) -> None:
        path = regular_file(self.directory, file_name)
        _check_header_size(path)
        try:
            # "pread" keeps no page of the file in this process, as a memory map would.
            file = self._files.enter_context(safetensors.safe_open(path, "np", backend="pread"))
            for name in file.keys() if wanted is None else wanted:
                tensor = file.get_slice(name)
                self.shapes[name] = tuple(tensor.get_shape())
                self._types[name] = tensor.get_dtype()
                self._file_of[name] = file
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


def _check_header_size(path: str) -> None:
    file_size = os.path.getsize(path)
    with open(path, "rb") as file:
        prefix = file.read(8)
    if len(prefix) < 8:
        raise CheckpointError(f"{path} is truncated: it has {file_size} bytes.")
    (header_size,) = struct.unpack("<Q", prefix)
    if header_size > min(MAX_HEADER_BYTES, file_size - 8):
        raise CheckpointError(
            f"{path}: its header should have {header_size} bytes, the file has {file_size} and a "
            f"header may have {MAX_HEADER_BYTES}: it is truncated, damaged or no safetensors file."
        )


def write_safetensors(
    path: str,
    shapes: Mapping[str, Sequence[int]],
    read: Callable[[str], np.ndarray],
    type_code: str = "F32",
) -> None:
    """Writes one file, holding one tensor in memory at a time; the library's writer holds all.

    The file is written under a temporary name and renamed.

    Args:
      shapes: `{name: shape}` in the order of the file.
      read: gives the values of a name, in any type.
      type_code: how they are stored, one of `FLOAT_TYPES`.
    """
    dtype = np.dtype(FLOAT_TYPES[type_code])
    header = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {"dtype": type_code, "shape": list(shape), "data_offsets": [start, end]}
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
        file.write(struct.pack("<Q", len(header_bytes)))
        file.write(header_bytes)
        for name in shapes:
            np.ascontiguousarray(read(name), dtype).tofile(file)
    os.replace(temporary, path)
