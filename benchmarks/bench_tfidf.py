"""The baseline of every classification recipe: logistic regression on TF-IDF of whole documents.

python -m benchmarks.bench_tfidf --data_dir=tfds://imdb_reviews/plain_text
"""

from __future__ import annotations

from absl import app, flags
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from bigbird.core.data import open_source

FLAGS = flags.FLAGS
flags.DEFINE_string("data_dir", "builtin://documents", "As for bigbird-classify.")
flags.DEFINE_string("tfds_data_dir", None, "As for bigbird-classify.")


def _read(split):
    source = open_source(FLAGS.data_dir, split, ("text", "label"), FLAGS.tfds_data_dir)
    examples = list(source.dataset.as_numpy_iterator())
    return [e["text"].decode() for e in examples], [e["label"] for e in examples]


def main(_):
    """Trains on the training split and prints the accuracy on the test split."""
    texts, labels = _read("train")
    classifier = make_pipeline(
        TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True),
        LogisticRegression(C=10.0, max_iter=1000),
    )
    classifier.fit(texts, labels)
    print(f"{FLAGS.data_dir}: accuracy {classifier.score(*_read('test')):.1%}")


if __name__ == "__main__":
    app.run(main)
