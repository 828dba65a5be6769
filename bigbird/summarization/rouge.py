"""ROUGE of summaries with bootstrap intervals, and the lead-k baseline to read it against."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

import numpy as np
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import DefaultTokenizer

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")

_RESAMPLES = 1000
_PERCENTILES = (2.5, 97.5)

_END_OF_SENTENCE = re.compile(r"(?<=[.!?])\s+|\s*\n\s*")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Mean of a score over all examples, from 0 to 1, and its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float

    def __str__(self):
        mean, low, high = (f"{100 * value:.2f}" for value in (self.mean, self.low, self.high))
        return f"{mean} [{low}, {high}]"


def rouge(
    references: Sequence[str], summaries: Sequence[str], seed: int = 0
) -> dict[str, Estimate]:
    """Scores summaries against their references.

    F1 of stemmed unigrams (`rouge1`), bigrams (`rouge2`), the longest common subsequence of whole
    texts (`rougeL`) and the union of those of sentences (`rougeLsum`). Line breaks are what parts
    sentences: restore them before. The interval holds the middle 95 % of the means of 1,000
    resamplings of the examples, drawn with replacement.

    Args:
      references: one a document.
      summaries: one a document, in the same order.
      seed: of the resampling.

    Raises:
      ValueError: for no examples, or numbers of texts that differ.

    Source: Lin 2004, by the package rouge-score; Efron and Tibshirani 1993, chapter 13.
    """
    if not references or len(references) != len(summaries):
        raise ValueError(
            "ROUGE needs one summary for each of at least one reference; received "
            f"{len(references)} references and {len(summaries)} summaries."
        )
    scorer = RougeScorer(ROUGE_TYPES, tokenizer=DefaultTokenizer(use_stemmer=True))
    scores = np.empty([len(references), len(ROUGE_TYPES)])
    for row, reference, summary in zip(scores, references, summaries, strict=True):
        found = scorer.score(reference, summary)
        row[:] = [found[name].fmeasure for name in ROUGE_TYPES]
    return dict(zip(ROUGE_TYPES, _estimates(scores, seed), strict=True))


def _estimates(scores: np.ndarray, seed: int) -> Iterable[Estimate]:
    """Scores `[examples, types]` -> an estimate of each type."""
    # The package's own aggregator draws from, and moves on, numpy's global generator.
    generator = np.random.default_rng(seed)
    examples = len(scores)
    means = [scores[generator.integers(examples, size=examples)].mean(0) for _ in range(_RESAMPLES)]
    low, high = np.percentile(means, _PERCENTILES, axis=0)
    for values in zip(scores.mean(axis=0), low, high, strict=True):
        yield Estimate(*map(float, values))


def lead(document: str, sentences: int) -> str:
    """Returns the first sentences of a document, one a line: the usual baseline.

    A sentence ends at a line break, or at white space behind a full stop, question or exclamation
    mark.
    """
    found = (sentence for sentence in _END_OF_SENTENCE.split(document.strip()) if sentence)
    return "\n".join(sentence for sentence, _ in zip(found, range(sentences), strict=False))
