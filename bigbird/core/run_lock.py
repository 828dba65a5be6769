"""One writer at a time: a file or directory is held by a process for as long as that lives."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from typing import IO


@contextlib.contextmanager
def exclusive_directory(directory: str) -> Iterator[None]:
    """Holds an existing local directory inside the block; a remote one (`gs://…`) is not held.

    Raises:
      ValueError: if another process holds it.
    """
    if "://" in directory:
        yield
        return
    with open(os.path.join(directory, ".lock"), "w") as file:
        hold(file, directory)
        yield


def hold(file: IO, name: str) -> None:
    """Locks an open file; the lock ends when it is closed or the process ends, killed or not.

    Args:
      file: local, open for writing.
      name: what the message calls it.

    Raises:
      ValueError: if another process holds it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"Another process is writing to {name}: let it finish, or choose another place."
        ) from error
