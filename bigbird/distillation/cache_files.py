"""Files of a teacher cache: shards with an index each, the manifest, and the lock of a writer.

    manifest.json           what the cache is of; once complete, every shard with its SHA-256
    capture.json            the flags of a capture by the command, for it to go on or repair
    shard-00000.tfrecord    records of `cache_format.py`
    shard-00000.json        keys, places and checksums of its records: a shard with this is finished
    writer-0-of-1.lock      while a process writes

A cache is a directory of a local or mounted file system.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import re
import shlex
import socket
import zlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

MANIFEST = "manifest.json"
FLAGS_FILE = "capture.json"
# Bytes that TFRecord puts before and behind a record: its length, and checksums of both.
_BEFORE_RECORD, _AROUND_RECORD = 12, 16
_SHARD_NAME = re.compile(r"shard-(\d{5,})\.tfrecord$")
_LOCK_NAME = re.compile(r"writer-(\d+)-of-(\d+)\.lock$")


class CacheError(ValueError):
    """A cache that is damaged, incomplete, in use, or not what was asked for."""


@dataclasses.dataclass(frozen=True)
class ShardIndex:
    """What a finished shard holds, in the order of its records.

    Attributes:
      sha256: of the file.
      bytes: its size.
      tokens: rows of all its records.
      max_length, max_input_length, max_rows: most tokens, `input_ids` and rows of a record.
      keys: names of the sequences.
      offsets: first byte of each record.
      sizes: bytes of each.
      checksums: CRC-32 of each.
    """

    sha256: str
    bytes: int
    tokens: int
    max_length: int
    max_input_length: int
    max_rows: int
    keys: list[str]
    offsets: list[int]
    sizes: list[int]
    checksums: list[int]

    @property
    def summary(self) -> dict[str, Any]:
        """What the manifest says of the shard."""
        return {
            "sequences": len(self.keys),
            "tokens": self.tokens,
            "bytes": self.bytes,
            "sha256": self.sha256,
        }


def shard_path(directory: str | os.PathLike, number: int) -> pathlib.Path:
    """Returns the file of a shard."""
    return pathlib.Path(directory) / f"shard-{number:05d}.tfrecord"


def index_path(directory: str | os.PathLike, number: int) -> pathlib.Path:
    """Returns the index file of a shard."""
    return shard_path(directory, number).with_suffix(".json")


def shard_numbers(directory: str | os.PathLike) -> list[int]:
    """Returns the numbers of the shards that have a file or an index, in order."""
    names = (path.with_suffix(".tfrecord").name for path in pathlib.Path(directory).glob("shard-*"))
    return sorted({int(match[1]) for match in map(_SHARD_NAME.match, names) if match})


def read_index(directory: str | os.PathLike, number: int) -> ShardIndex | None:
    """Returns the index of a shard; None where the shard is not finished.

    Raises:
      CacheError: where the index cannot be read.
    """
    path = index_path(directory, number)
    if not path.exists():
        return None
    try:
        return ShardIndex(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise CacheError(f"{path} is damaged ({error}). {remedy(directory)}") from error


def read_manifest(directory: str | os.PathLike) -> dict[str, Any] | None:
    """Returns the manifest of a cache; None where there is none.

    Raises:
      CacheError: where it cannot be read.
    """
    path = pathlib.Path(directory) / MANIFEST
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise CacheError(
            f"{path} is damaged ({error}). Delete it and start the capture again with the flags "
            "it had: finished shards are taken up."
        ) from error


def write_manifest(
    directory: str | os.PathLike, manifest: dict[str, Any], alone: bool = False
) -> None:
    """Writes the manifest, whole or not at all; `alone` as for `write_durably`."""
    path = pathlib.Path(directory) / MANIFEST
    write_durably(path, json.dumps(manifest, indent=1) + "\n", alone)


def write_durably(path: pathlib.Path, text: str, alone: bool) -> None:
    """Writes a file that is on the disk, whole, before it has its name.

    Args:
      alone: whether nobody else can be writing this file; what killed writers of it have left
        under their temporary names is then removed.
    """
    if alone:
        for leftover in path.parent.glob(f"{path.name}.tmp*"):
            leftover.unlink()
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    try:
        with open(temporary, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _rename_durably(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _rename_durably(temporary, path):
    os.replace(temporary, path)
    _sync(path.parent)


def _sync(path):
    """Waits until the disk has a file's content, or a directory's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: str | os.PathLike) -> str:
    """Returns the SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def no_cache(directory: str | os.PathLike) -> str:
    """Returns the text of the error for a directory without a manifest."""
    return (
        f"{directory} holds no teacher cache, for there is no {MANIFEST}: make one by "
        "bigbird-cache-teacher."
    )


def remedy(directory: str | os.PathLike) -> str:
    """Returns what mends a damaged cache, a sentence."""
    command = f"bigbird-cache-teacher --cache_dir={shlex.quote(str(directory))} --repair"
    if (pathlib.Path(directory) / FLAGS_FILE).exists():
        return f"Run {command}."
    return f"Run {command} with the flags of its capture, or import its arrays again."


def read_record(path: str | os.PathLike, offset: int, size: int, checksum: int) -> bytes:
    """Returns a record of a shard.

    Raises:
      CacheError: where the shard is not there, or the record is not the one that was written.
    """
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            record = file.read(size)
    except FileNotFoundError as error:
        raise CacheError(f"{path} is missing. {remedy(os.path.dirname(path))}") from error
    if zlib.crc32(record) != checksum:
        raise CacheError(
            f"{path} is damaged: the record at byte {offset} has changed. "
            f"{remedy(os.path.dirname(path))}"
        )
    return record


class ShardWriter:
    """Writes one shard under a temporary name; `finish` gives it its name and its index.

    The index comes last: a shard without one is not finished, whatever stopped the process.
    """

    def __init__(self, directory: str | os.PathLike, number: int):
        """Begins shard `number`; one that a killed process began is written over."""
        self.number = number
        self._path = shard_path(directory, number)
        self._temporary = self._path.with_suffix(".tfrecord.tmp")
        self._lengths = []
        self._keys, self._offsets, self._sizes, self._checksums = [], [], [], []
        self._end = 0
        self._writer = None
        with self._disk_errors():
            self._writer = tf.io.TFRecordWriter(str(self._temporary))

    def __len__(self):
        return len(self._keys)

    def write(self, key: str, record: bytes, length: int, input_length: int, rows: int) -> None:
        """Adds a record.

        Args:
          key: of the sequence.
          record: its bytes.
          length, input_length, rows: its number of tokens, `input_ids` and rows.

        Raises:
          OSError: where the disk is full or fails; the shard is then given up.
        """
        with self._disk_errors():
            self._writer.write(record)
        self._keys.append(key)
        self._offsets.append(self._end + _BEFORE_RECORD)
        self._sizes.append(len(record))
        self._checksums.append(zlib.crc32(record))
        self._end += len(record) + _AROUND_RECORD
        self._lengths.append((length, input_length, rows))

    def finish(self) -> ShardIndex:
        """Gives the shard its name once it is on the disk, and then its index.

        Raises:
          OSError: where the disk is full or fails; the shard is then given up.
        """
        with self._disk_errors():
            self._writer.close()
            _sync(self._temporary)
            lengths, input_lengths, rows = zip(*self._lengths, strict=True)
            index = ShardIndex(
                sha256=file_sha256(self._temporary),
                bytes=self._end,
                tokens=sum(rows),
                max_length=max(lengths),
                max_input_length=max(input_lengths),
                max_rows=max(rows),
                keys=self._keys,
                offsets=self._offsets,
                sizes=self._sizes,
                checksums=self._checksums,
            )
            # An index of a shard that is replaced would promise another file.
            self._path.with_suffix(".json").unlink(missing_ok=True)
            _rename_durably(self._temporary, self._path)
            text = json.dumps(dataclasses.asdict(index))
            write_durably(self._path.with_suffix(".json"), text, alone=True)
        return index

    def abort(self) -> None:
        """Gives the shard up."""
        if self._writer is not None:
            # Closing writes what is buffered, and the disk may be full.
            with contextlib.suppress(tf.errors.OpError):
                self._writer.close()
        self._temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _disk_errors(self):
        try:
            yield
        except (OSError, tf.errors.OpError) as error:
            self.abort()
            raise OSError(
                f"{self._path} could not be written; the shards before it are whole. Make room "
                f"or mend the disk, and start the same capture again: it goes on from there. "
                f"({error})"
            ) from error


@contextlib.contextmanager
def writer_lock(
    directory: str | os.PathLike, shard_index: int = 0, num_shards: int = 1
) -> Iterator[None]:
    """Keeps other writers of the same shards out of a directory while the block runs.

    The operating system holds the lock for the process and takes it away when that ends, even by
    `kill -9`: the file a killed process leaves behind is no obstacle on the same host. Of another
    host nobody can tell, so its file is one.

    Args:
      directory: the cache.
      shard_index, num_shards: the worker, of how many; workers of one number of shards write
        different ones.

    Raises:
      CacheError: naming the process that writes there.
    """
    path = pathlib.Path(directory) / f"writer-{shard_index}-of-{num_shards}.lock"
    with _hold(path):
        for other in pathlib.Path(directory).glob("writer-*.lock"):
            match = _LOCK_NAME.match(other.name)
            if match and other != path and int(match[2]) != num_shards:
                # Workers of another number of shards would write some of the same.
                with _hold(other):
                    pass
        yield


@contextlib.contextmanager
def _hold(path):
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        owner = os.read(handle, 2**12).decode(errors="replace")
        ours = f"process {os.getpid()} on host {socket.gethostname()}"
        is_of_this_host = owner.endswith(ours.partition(" on ")[2])
        if not _try_lock(handle) or (owner and not is_of_this_host):
            raise CacheError(
                f"{path.parent} is being written by {owner or 'another process'}. Wait for it, or "
                f"stop it. Only if it is surely gone, delete {path} and start again."
            )
        try:
            os.ftruncate(handle, 0)
            os.pwrite(handle, ours.encode(), 0)
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _try_lock(handle):
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # Its last holder deletes the file, and a lock on a deleted one keeps nobody out.
    return os.fstat(handle).st_nlink > 0
