"""How much of a built-in document must be read to tell its label: TF-IDF by tokens read.

    python -m benchmarks.bench_builtin_documents

Prints the figures of docs/data.md and writes results/builtin_documents.csv and .png. The classifier
is logistic regression on TF-IDF of the ids of the built-in vocabulary: no neural network, no luck.
"""

from __future__ import annotations

import collections
import csv
import json

import numpy as np
import sentencepiece
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from benchmarks import harness
from bigbird.core.corpora import builtin_documents

TOKENS_READ = (128, 256, 512, 1024, 2048, 4096)


def accuracy(pieces, labels, tokens: int) -> float:
    """Trains on the first `tokens` ids of the training documents; returns the test accuracy."""
    classifier = make_pipeline(
        TfidfVectorizer(analyzer=lambda ids: ids[:tokens], sublinear_tf=True),
        LogisticRegression(C=10.0, max_iter=300),
    )
    classifier.fit(pieces["train"], labels["train"])
    return classifier.score(pieces["test"], labels["test"])


def main():
    """Measures, prints and writes."""
    folder = builtin_documents.prepare()
    vocabulary = sentencepiece.SentencePieceProcessor(
        model_file=str(folder / builtin_documents.VOCABULARY_FILE)
    )
    pieces, labels = {}, {}
    for split in builtin_documents.SPLITS:
        with open(folder / f"{split}.jsonl", encoding="utf-8") as file:
            documents = [json.loads(line) for line in file]
        pieces[split] = vocabulary.encode([d["text"] for d in documents], num_threads=2)
        labels[split] = [d["label"] for d in documents]
        lengths = [len(ids) for ids in pieces[split]]
        print(
            f"{split}: {len(documents)} documents, {min(lengths)} to {max(lengths)} tokens, "
            f"median {np.median(lengths):.0f}; {dict(collections.Counter(labels[split]))}"
        )

    majority = collections.Counter(labels["test"]).most_common(1)[0][1] / len(labels["test"])
    measured = {tokens: accuracy(pieces, labels, tokens) for tokens in TOKENS_READ}
    print(f"majority class: {majority:.1%}")
    for tokens, value in measured.items():
        print(f"first {tokens} tokens: {value:.1%}")

    path = harness.RESULTS / "builtin_documents.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["tokens_read", "test_accuracy", "test_documents", "majority_class"])
        for tokens, value in measured.items():
            writer.writerow([tokens, round(value, 4), len(labels["test"]), round(majority, 4)])
    harness.draw(
        path.with_suffix(".png"),
        {
            "TF-IDF, logistic regression": list(measured.items()),
            "majority class": [(tokens, majority) for tokens in TOKENS_READ],
        },
        xlabel="tokens read",
        ylabel="test accuracy",
        title="Built-in documents: how far one must read",
    )


if __name__ == "__main__":
    main()
