"""The second act of `make demo`: a teacher, its cache, students that never meet the teacher.

It runs the commands a user would, on the built-in documents, and prints each one first.
"""

from __future__ import annotations

import pathlib
import shutil
import time

from bigbird.core.corpora import builtin_documents
from bigbird.core.tour import print_title, run_command
from bigbird.distillation.report import Run

RUNS = pathlib.Path("runs/demo-distillation")
VOCABULARY, PIECES = RUNS / "vocabulary.model", 200
LENGTH, HIDDEN_WORDS = 64, 10
TEXT = {
    "vocab_model_file": VOCABULARY,
    "max_encoder_length": LENGTH,
    "substitute_newline": " ",
}
DATA = {"data_dir": "builtin://documents", **TEXT}
MODEL = {
    "attention_type": "original_full",
    "max_position_embeddings": LENGTH,
    "hidden_dropout_prob": 0,
    "attention_probs_dropout_prob": 0,
    "num_attention_heads": 2,
    "optimizer": "Adam",
    "learning_rate": 2e-3,
    "num_warmup_steps": 20,
    "train_batch_size": 16,
}
TEACHER = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 512}
STUDENT = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 256}
STEPS = {"num_train_steps": 120, "save_checkpoints_steps": 60}
# By what they learn from: the share of hard labels in their loss.
STUDENTS = {"cache": 0, "labels": 1}


def main():
    """Runs the tour."""
    start = time.time()
    shutil.rmtree(RUNS, ignore_errors=True)
    builtin_documents.write_vocabulary(VOCABULARY, PIECES)
    teacher = RUNS / "teacher"
    words = {"max_predictions_per_seq": HIDDEN_WORDS}

    print_title(f"5. Pretrain a small teacher on hidden pieces, of a vocabulary of {PIECES}")
    run_command(
        "bigbird.pretrain.run_pretraining",
        DATA | MODEL | TEACHER | STEPS | words | {"output_dir": teacher},
    )

    print_title("6. Capture it once: 100 logits of a hidden piece, and all of held-out documents")
    for split, k in (("train", 100), ("validation", 0)):
        captured = {"init_checkpoint": teacher, "split": split, "k": k}
        run_command(
            "bigbird.distillation.cache_teacher",
            DATA | words | captured | {"cache_dir": RUNS / f"cache-{split}"},
            "--compact",
        )

    print_title("7. Train a student from the cache, without the teacher; another on labels alone")
    caches = {"cache_dir": RUNS / "cache-train", "held_out_cache_dir": RUNS / "cache-validation"}
    for name, share in STUDENTS.items():
        run_command(
            "bigbird.distillation.run_distillation",
            TEXT
            | MODEL
            | STUDENT
            | STEPS
            | caches
            | {"label_share": share, "output_dir": RUNS / name},
        )

    print_title("Summary")
    print("Divergence from the teacher on documents that neither student has seen, in nats:")
    for name in STUDENTS:
        curve = Run.read(str(RUNS / name)).curve("validation", "kl")
        print(f"  {name:8}" + ", ".join(f"{kl:.3f} after {step} steps" for step, kl in curve))
    print(f"{time.time() - start:.0f} seconds; curves and memory are in {RUNS}/cache/report.html")


if __name__ == "__main__":
    main()
