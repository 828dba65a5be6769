"""One writer at a time: a directory is held by a process for as long as that process lives."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator


@contextlib.contextmanager
def exclusive_directory(directory: str) -> Iterator[None]:
    """Holds an existing local directory inside the block; a remote one (`gs://…`) is not held.

    The lock belongs to the open file `.lock`, so it ends with the process, killed or not.

    Raises:
      ValueError: if another process holds it.
    """
    if "://" in directory:
        yield
        return
    with open(os.path.join(directory, ".lock"), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"Another process is writing to {directory}: let it finish, or choose another "
                "directory."
            ) from error
        yield
