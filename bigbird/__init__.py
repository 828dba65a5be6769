"""BigBird for TensorFlow: long documents and offline distillation in the memory people have."""

import os
import sys

__version__ = "0.1.0"

# A command of ours (`bigbird-…` or `python -m bigbird.…`) says in its own words what is wrong.
# Between them stand notes of TensorFlow's C++ core on drivers and instruction sets, from the moment
# it is loaded. As a library the package leaves that alone; set TF_CPP_MIN_LOG_LEVEL=0 to see them.
_PROGRAM = os.path.basename((sys.argv or [""])[0])
if _PROGRAM == "-m" or _PROGRAM.startswith("bigbird-"):
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
