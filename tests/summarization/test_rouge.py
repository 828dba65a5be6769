"""Claims about ROUGE, its intervals and the lead baseline."""

import numpy as np
import pytest
from rouge_score.rouge_scorer import RougeScorer

from bigbird.summarization.rouge import ROUGE_TYPES, Estimate, lead, rouge

REFERENCES = ["the cat sat on the mat", "dogs bark loudly", "", "one two three four"]
SUMMARIES = ["the cat lay on a mat", "a dog barks", "text", "one two three four"]


def test_means_are_those_of_the_package_over_every_example():
    scorer = RougeScorer(ROUGE_TYPES, use_stemmer=True)
    scores = [scorer.score(r, s) for r, s in zip(REFERENCES, SUMMARIES, strict=True)]
    found = rouge(REFERENCES, SUMMARIES)
    assert list(found) == ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    for name, estimate in found.items():
        assert estimate.mean == pytest.approx(np.mean([score[name].fmeasure for score in scores]))


def test_unigrams_by_hand():
    # 4 of 6 words are shared; the stem of one more, of 3 and 3.
    estimates = rouge(["the cat sat on the mat", "dogs bark"], ["the cat lay on a mat", "dog hum"])
    assert estimates["rouge1"].mean == pytest.approx((4 / 6 + 1 / 2) / 2)
    assert rouge(["a b c"], ["a b c"])["rouge2"] == Estimate(1.0, 1.0, 1.0)


def test_line_breaks_part_sentences_for_lsum_alone():
    spaced = "one two three. four five six.", "four five six. one two three."
    broken = [text.replace(". ", ".\n") for text in spaced]
    with_space, with_break = (rouge([pair[0]], [pair[1]]) for pair in (spaced, broken))
    assert with_break["rougeLsum"].mean == 1.0
    assert with_space["rougeLsum"].mean == pytest.approx(0.5)
    assert with_break["rougeL"].mean == with_space["rougeL"].mean == pytest.approx(0.5)


def test_interval_is_that_of_the_normal_distribution_for_many_examples():
    generator = np.random.default_rng(0)
    words = [f"w{i}" for i in range(10)]
    references = [" ".join(generator.choice(words, 8)) for _ in range(300)]
    summaries = [" ".join(generator.choice(words, 8)) for _ in range(300)]
    scorer = RougeScorer(["rouge1"], use_stemmer=True)
    scores = [
        scorer.score(r, s)["rouge1"].fmeasure for r, s in zip(references, summaries, strict=True)
    ]
    error = np.std(scores) / np.sqrt(len(scores))
    estimate = rouge(references, summaries)["rouge1"]
    # The ends of a thousand resamplings scatter by about 5 % of the interval's half.
    assert estimate.mean - estimate.low == pytest.approx(1.96 * error, rel=0.15)
    assert estimate.high - estimate.mean == pytest.approx(1.96 * error, rel=0.15)


def test_intervals_are_the_same_every_time_and_leave_the_global_generator_alone():
    before = np.random.get_state()[1].copy()
    assert rouge(REFERENCES, SUMMARIES) == rouge(REFERENCES, SUMMARIES)
    np.testing.assert_array_equal(np.random.get_state()[1], before)


@pytest.mark.parametrize(("references", "summaries"), [([], []), (["a"], ["a", "b"])])
def test_numbers_of_texts_that_do_not_fit_are_told(references, summaries):
    with pytest.raises(ValueError, match=f"{len(references)} references and {len(summaries)} sum"):
        rouge(references, summaries)


def test_an_estimate_reads_in_percent():
    assert str(Estimate(0.41234, 0.4, 0.425)) == "41.23 [40.00, 42.50]"


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("One. Two! Three? Four.", "One.\nTwo!"),
        ("Heading\n\nIt is 3.5 long.\nMore", "Heading\nIt is 3.5 long."),
        ("Only one", "Only one"),
        ("  \n ", ""),
        ("", ""),
    ],
)
def test_lead_is_the_first_sentences(document, expected):
    assert lead(document, 2) == expected
