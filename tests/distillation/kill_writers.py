"""Program of a test: starts the writing of a small cache ten times and kills it by `kill -9`.

It forks before TensorFlow has made a thread, so that a start costs little. Prints how many shards
were finished at each kill.
"""

import json
import os
import pathlib
import random
import signal
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
from tests.distillation import cache_writing as small

KILLS = 10


def main(directory):
    killed_at, moments = [], random.Random(0)
    for _ in range(KILLS):
        ready, announce = os.pipe()
        child = os.fork()
        if child == 0:
            write(directory, announce)
        os.close(announce)
        # A byte comes for every sequence that is written.
        for _ in range(moments.randint(1, 6)):
            os.read(ready, 1)
        time.sleep(moments.uniform(0.0, 0.02))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            sys.exit("The writer ended before it was killed.")
        killed_at.append(len(list(directory.glob("shard-*.json"))))
    print(json.dumps(killed_at))


def write(directory, announce):
    with small.open_writer(directory) as writer:
        for number in range(small.SEQUENCES):
            if small.write_all(writer, [number]):
                os.write(announce, b"!")
    os.close(announce)
    time.sleep(60)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
