"""The first act of `make demo`: train, evaluate, export and serve a 4,096-token classifier.

It runs the commands a user would, on the built-in documents, and prints each one first.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys
import time

from bigbird.core.corpora import builtin_documents
from bigbird.core.tour import print_title, run_command

RUN = pathlib.Path("runs/demo")
SIZES = {
    "max_encoder_length": 4096,
    "block_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "hidden_dropout_prob": 0.0,
    "norm_type": "prenorm",
    # Larger than the usual 0.02: a model this small learns sooner.
    "initializer_range": 0.1,
}
# Layers of the model whose memory is planned beside the demo's own.
DEEPER = 4
BATCH_SIZE = 2
TRAINING = {
    "data_dir": "builtin://documents",
    "vocab_model_file": "builtin",
    "num_labels": 5,
    "optimizer": "Adam",
    "learning_rate": 1e-3,
    "num_train_steps": 600,
    "num_warmup_steps": 60,
    "train_batch_size": BATCH_SIZE,
    "eval_batch_size": 8,
    "save_checkpoints_steps": 300,
    "log_steps": 50,
}
SERVE = """
import sys, tensorflow as tf, tensorflow_text
served = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
print(served(tf.constant([sys.stdin.read()]))["probabilities"].numpy()[0].tolist())
"""


def main():
    """Runs the tour."""
    start = time.time()
    print_title("1. The built-in documents and their vocabulary")
    test = _documents("test")
    labels = sorted({document["label"] for document in test})
    majority = max(sum(d["label"] == label for d in test) for label in labels) / len(test)
    print(f"{len(_documents('train'))} training and {len(test)} test documents of {labels}.")

    print_title("2. Memory of one training step at 4,096 tokens, planned by XLA")
    for layers in (SIZES["num_hidden_layers"], DEEPER):
        planned = {
            "num_hidden_layers": layers,
            "vocab_model_file": "builtin",
            "train_batch_size": BATCH_SIZE,
            "optimizer": TRAINING["optimizer"],
            "policies": "none,full",
        }
        run_command("bigbird.core.memory", SIZES | planned)

    print_title("3. Train, evaluate, export")
    shutil.rmtree(RUN, ignore_errors=True)
    run_command(
        "bigbird.classifier.run_classifier",
        SIZES | TRAINING | {"output_dir": RUN},
        "--use_gradient_checkpointing",
        "--jit_compile",
        "--do_eval",
        "--do_export",
    )

    print_title("4. Load the export in a new process and classify a document")
    document = test[0]
    served = subprocess.run(
        [sys.executable, "-c", SERVE, str(RUN / "export")],
        input=document["text"],
        capture_output=True,
        text=True,
        check=False,
    )
    if served.returncode:
        sys.exit(served.stderr)
    probabilities = json.loads(served.stdout)
    guess = labels[probabilities.index(max(probabilities))]
    print(f"A document of {document['label']!r} was taken for {guess!r}:")
    for label, probability in zip(labels, probabilities, strict=True):
        print(f"  {label:<12}{probability:6.1%}")

    results = json.loads((RUN / f"eval_results_{TRAINING['num_train_steps']}.json").read_text())
    print_title("Summary")
    print(f"accuracy {results['accuracy']:.1%}, majority class {majority:.1%}")
    print(f"{time.time() - start:.0f} seconds; the run is in {RUN}")


def _documents(split):
    lines = (builtin_documents.prepare() / f"{split}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


if __name__ == "__main__":
    main()
