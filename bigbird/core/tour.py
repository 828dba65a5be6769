"""What the acts of `make demo` share: titles, and commands that are printed before they run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys


def print_title(title):
    """Prints a title, bold in a terminal."""
    print(f"\n\033[1m{title}\033[0m" if sys.stdout.isatty() else f"\n{title}", flush=True)


def run_command(module, flags, *switches):
    """Prints and runs `python -m module` with a dict of flags and further arguments.

    Raises:
      subprocess.CalledProcessError: where it fails.
    """
    arguments = [*(f"--{name}={value}" for name, value in flags.items()), *switches]
    print("$ python -m", module, shlex.join(arguments), flush=True)
    # Keeps what TensorFlow's C++ says about missing GPUs out of the tour.
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    subprocess.run([sys.executable, "-m", module, *arguments], check=True, env=environment)
