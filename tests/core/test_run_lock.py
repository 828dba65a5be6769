"""A directory has one writer at a time, and a dead one does not hold it."""

import subprocess
import sys

import pytest

from bigbird.core.run_lock import exclusive_directory

HOLD = """
import sys
from bigbird.core.run_lock import exclusive_directory
with exclusive_directory(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match="Another process is writing to"):
            with exclusive_directory(str(tmp_path)):
                pass
    finally:
        holder.kill()
        holder.communicate()
    with exclusive_directory(str(tmp_path)):
        pass
