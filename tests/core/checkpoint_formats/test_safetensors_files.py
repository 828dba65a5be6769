"""Files of strangers give tensors or an error that says what is wrong, whatever is in them."""

import contextlib
import json
import os
import pathlib
import resource
import struct
import tempfile

import hypothesis
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import strategies

from bigbird.core.checkpoint_formats import safetensors_files
from bigbird.core.checkpoint_formats.safetensors_files import CheckpointError, SafetensorsDirectory

MANY = hypothesis.settings(
    max_examples=1000, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.float16),
    "c": np.arange(3, dtype=np.int64),
}


def _write(directory, tensors=None):
    path = pathlib.Path(directory) / "model.safetensors"
    safetensors.numpy.save_file(TENSORS if tensors is None else tensors, path)
    return path


def _read_all(directory):
    with contextlib.closing(SafetensorsDirectory(str(directory))) as files:
        return {name: files.read(name) for name in files.shapes if name != "c"}


def test_tensors_and_shapes_are_those_written(tmp_path):
    _write(tmp_path)
    with contextlib.closing(SafetensorsDirectory(str(tmp_path))) as files:
        assert files.shapes == {name: value.shape for name, value in TENSORS.items()}
        for name in ("a", "b"):
            np.testing.assert_array_equal(files.read(name), TENSORS[name])
        with pytest.raises(CheckpointError, match="c has the type I64"):
            files.read("c")


def test_the_writer_writes_what_the_library_reads(tmp_path):
    path = str(tmp_path / "model.safetensors")
    shapes = {"x": (2, 3), "empty": (0, 4), "scalar": ()}
    values = {name: np.full(shape, 1.5, np.float32) for name, shape in shapes.items()}
    for code, dtype in safetensors_files.FLOAT_TYPES.items():
        safetensors_files.write_safetensors(path, shapes, values.get, code)
        read = safetensors.numpy.load_file(path)
        assert {name: value.shape for name, value in read.items()} == shapes
        for name, value in read.items():
            assert value.dtype == np.dtype(dtype)
            np.testing.assert_array_equal(value.astype(np.float32), values[name])
        with safetensors.safe_open(path, "np") as file:
            assert file.metadata() == {"format": "pt"}
    assert os.listdir(tmp_path) == ["model.safetensors"]


# ------------------------------------------------------------------------------- mutated files

# Drawn from a list: a thousand values that hypothesis composes itself take half a minute.
_JSON = strategies.sampled_from(
    [None, True, 0, -1, 7, 2**63, 2**70, 0.5, float("nan"), "", "F32", "I64", "../../etc/passwd"]
    + ["model.safetensors", [], [0], [2**62, 8], [[]], {}, {"a": "b"}, {"a": {"a": None}}]
)
_TENSOR = strategies.fixed_dictionaries(
    {},
    optional={
        "dtype": strategies.sampled_from(["F32", "F16", "BF16", "F64", "I64", "F8_E4M3"]) | _JSON,
        "shape": strategies.lists(strategies.integers(0, 2**63), max_size=4) | _JSON,
        "data_offsets": strategies.lists(strategies.integers(0, 80), min_size=2, max_size=2)
        | _JSON,
        "x": _JSON,
    },
)
_HEADER = strategies.dictionaries(
    strategies.sampled_from(["a", "b", "c", "__metadata__", ""]), _TENSOR | _JSON, max_size=4
)


@strategies.composite
def _mutated_files(draw):
    """Bytes of a safetensors file that were damaged, or never were one."""
    whole = safetensors.numpy.save(TENSORS)
    kind = draw(strategies.sampled_from(["bytes", "cut", "length", "header", "noise"]))
    if kind == "noise":
        return draw(strategies.binary(max_size=64))
    if kind == "cut":
        return whole[: draw(strategies.integers(0, len(whole) - 1))]
    if kind == "length":
        length = draw(strategies.integers(0, 2**64 - 1) | strategies.integers(0, 2 * len(whole)))
        return struct.pack("<Q", length) + whole[8:]
    if kind == "header":
        text = json.dumps(draw(_HEADER)).encode()
        return struct.pack("<Q", len(text)) + text + whole[-58:]
    damaged = bytearray(whole)
    for _ in range(draw(strategies.integers(1, 4))):
        damaged[draw(strategies.integers(0, len(whole) - 59))] = draw(strategies.integers(0, 255))
    return bytes(damaged)


def _tensors_or_error(directory):
    """Reads a directory: only tensors of plausible sizes or a `CheckpointError` may come."""
    try:
        tensors = _read_all(directory)
    except CheckpointError as error:
        assert str(directory) in str(error) and len(str(error)) < 2000
    else:
        assert all(value.nbytes <= 1000 for value in tensors.values())


@pytest.fixture(scope="module", autouse=True)
def memory_stays_small():
    """All the examples of this module together may not take 500 MB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < 500e6


@MANY
@hypothesis.given(_mutated_files())
def test_a_mutated_file_gives_an_error_or_tensors(contents):
    with tempfile.TemporaryDirectory() as directory:
        (pathlib.Path(directory) / "model.safetensors").write_bytes(contents)
        _tensors_or_error(directory)


_FILE_NAMES = strategies.sampled_from(
    [
        "part.safetensors",
        "gone.safetensors",
        "../part.safetensors",
        "/etc/passwd",
        "sub/part.safetensors",
        "..\\part.safetensors",
        "link.safetensors",
        "pipe.safetensors",
        ".",
        "..",
        "",
        "part.bin",
        "part.safetensors\0",
        "x" * 300 + ".safetensors",
    ]
)
_INDEX = (
    strategies.fixed_dictionaries(
        {
            "weight_map": strategies.dictionaries(
                strategies.sampled_from(["a", "b", "c", "d"]), _FILE_NAMES | _JSON, max_size=4
            )
            | _JSON
        },
        optional={"metadata": _JSON},
    )
    | _JSON
)


@pytest.fixture(scope="module")
def shard_directory(tmp_path_factory):
    """A directory with a shard, and with what must not be followed."""
    directory = tmp_path_factory.mktemp("shards")
    _write(directory).rename(directory / "part.safetensors")
    (directory / "link.safetensors").symlink_to(directory / "part.safetensors")
    os.mkfifo(directory / "pipe.safetensors")
    (directory / "sub").mkdir()
    return directory


@MANY
@hypothesis.given(
    _INDEX.map(json.dumps).map(str.encode)
    | strategies.binary(max_size=40)
    | strategies.integers(1, 200_000).map(lambda depth: b'{"weight_map":' + b"[" * depth)
)
def test_a_mutated_index_gives_an_error_or_tensors(shard_directory, contents):
    (shard_directory / "model.safetensors.index.json").write_bytes(contents)
    _tensors_or_error(shard_directory)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("../outside.safetensors", "of the same directory"),
        ("/etc/passwd", "of the same directory"),
        ("sub/part.safetensors", "of the same directory"),
        ("link.safetensors", "symbolic link"),
        ("pipe.safetensors", "expected a file"),
        ("gone.safetensors", "No such file"),
    ],
)
def test_an_index_cannot_lead_out_of_its_directory(shard_directory, name, told):
    index = shard_directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=told):
        SafetensorsDirectory(str(shard_directory))


def test_a_tensor_that_its_file_lacks_is_told(shard_directory):
    index = shard_directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"nothing": "part.safetensors"}}))
    with pytest.raises(CheckpointError, match="nothing"):
        SafetensorsDirectory(str(shard_directory))


def test_links_to_the_weights_are_not_followed(tmp_path):
    (tmp_path / "real").mkdir()
    target = _write(tmp_path / "real")
    (tmp_path / "model.safetensors").symlink_to(target)
    with pytest.raises(CheckpointError, match="symbolic link"):
        SafetensorsDirectory(str(tmp_path))


@pytest.mark.parametrize("size", [0, 7, 8, 20, 150])
def test_a_truncated_file_is_told(tmp_path, size):
    path = _write(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="truncated|cannot be read"):
        SafetensorsDirectory(str(tmp_path))


def test_a_header_is_not_read_before_its_size_is_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_files, "MAX_HEADER_BYTES", 100)
    _write(tmp_path)
    with pytest.raises(CheckpointError, match="a header may have 100"):
        SafetensorsDirectory(str(tmp_path))


def test_a_json_file_that_is_too_large_is_not_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_files, "MAX_JSON_BYTES", 10)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(CheckpointError, match="larger than 10 bytes"):
        SafetensorsDirectory(str(tmp_path))
