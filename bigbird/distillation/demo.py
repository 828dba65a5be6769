"""The second act of `make demo`: a teacher, its cache, a student that never meets the teacher.

It runs `distill.sh` with tiny sizes, and compares the student with one that learned from hard
labels alone.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import time

from bigbird.distillation.report import Run

RUNS = pathlib.Path("runs/demo-distillation")
SCRIPT = pathlib.Path(__file__).with_name("distill.sh")
SIZES = {
    "TEACHER_LAYERS": 2,
    "TEACHER_SIZE": 128,
    "TEACHER_INTERMEDIATE_SIZE": 512,
    "TEACHER_STEPS": 400,
    "TEACHER_WARMUP_STEPS": 40,
    "TEACHER_LEARNING_RATE": 2e-3,
    "COPIES": 2,
    "STUDENT_LAYERS": 1,
    "STUDENT_SIZE": 64,
    "STUDENT_INTERMEDIATE_SIZE": 256,
    "NUM_TRAIN_STEPS": 300,
    "NUM_WARMUP_STEPS": 30,
    "SAVE_CHECKPOINTS_STEPS": 100,
    "LEARNING_RATE": 2e-3,
    "MODES": "offline_fused",
}


def main():
    """Runs the tour."""
    start = time.time()
    print("\nA teacher is captured once, a student learns from its cache", flush=True)
    shutil.rmtree(RUNS, ignore_errors=True)
    settings = {name: str(value) for name, value in SIZES.items()}
    environment = {**os.environ, **settings, "RUNS": str(RUNS), "PYTHON": sys.executable}
    result = subprocess.run([SCRIPT], env=environment, check=False)
    if result.returncode:
        sys.exit(f"{SCRIPT.name} ended with status {result.returncode}.")
    print("\nSummary: students of the same size and start, on held-out text")
    print(f"{'learned from':24}{'divergence from the teacher':>30}{'agreement':>12}")
    for name, learned_from in (("offline_fused", "the teacher's cache"), ("labels", "hard labels")):
        run = Run.read(str(RUNS / name))
        divergence, agreement = (
            run.curve("validation", column)[-1][1] for column in ("kl", "argmax_agreement")
        )
        print(f"{learned_from:24}{divergence:>25.3f} nats{agreement:>12.1%}")
    print(f"{time.time() - start:.0f} seconds; curves and memory are in {RUNS}/comparison.html")


if __name__ == "__main__":
    main()
