"""Claims about the built-in summaries: real pairs, many, always the same, split by file."""

import json

import numpy as np
import pytest

from bigbird.core.corpora import builtin_summaries
from bigbird.core.corpora.builtin_documents import SPLITS, Subsystem
from bigbird.core.corpora.builtin_summaries import documented, make_examples, prepare

LONG = "The details follow here and go on for some time. " * 30 + "That is all."
SUMMARY = "Says in one sentence what the rest is about."


@pytest.fixture(scope="module")
def examples():
    folder = prepare()
    return {
        split: [json.loads(line) for line in (folder / f"{split}.jsonl").open(encoding="utf-8")]
        for split in SPLITS
    }


def test_there_are_a_thousand_to_train_on_and_a_hundred_to_test_on(examples):
    assert len(examples["train"]) >= 1000
    assert len(examples["validation"]) >= 100
    assert len(examples["test"]) >= 100


def test_a_summary_is_a_sentence_and_much_shorter_than_its_document(examples):
    for example in examples["test"]:
        assert example["summary"].endswith(".") and "\n" not in example["summary"]
        assert 5 <= len(example["summary"].split()) <= 60
        assert len(example["document"]) >= 1200
    words = [len(example["document"].split()) for example in examples["train"]]
    assert np.median(words) > 200


def test_no_file_document_or_summary_is_in_two_splits(examples):
    for field in ("file", "document", "summary"):
        values = {split: {example[field] for example in examples[split]} for split in SPLITS}
        assert not values["train"] & values["test"]
        assert not values["train"] & values["validation"]
        assert not values["validation"] & values["test"]


def test_second_call_makes_nothing(monkeypatch):
    folder = prepare()
    monkeypatch.setattr(builtin_summaries, "make_examples", None)
    assert prepare() == folder


def test_a_docstring_is_cut_behind_its_first_paragraph():
    source = (
        f'def f():\n    """{SUMMARY[:20]}\n    {SUMMARY[21:]}\n\n    {LONG}\n\n    End.\n    """'
    )
    [(document, summary)] = documented(source)
    assert summary == SUMMARY
    assert document == f"{LONG}\n\nEnd."


def test_a_module_goes_on_with_the_documentation_of_its_members():
    source = (
        f'"""{SUMMARY}"""\nclass C:\n    """A class of things."""\n'
        f'    def m(self):\n        """Does it."""\n\ndef f():\n    """{LONG}"""\n'
    )
    [(document, summary)] = documented(source)
    assert summary == SUMMARY
    assert document == f"C: A class of things.\n\nm: Does it.\n\nf: {LONG}"


@pytest.mark.parametrize(
    "docstring",
    [
        "Short of details, this is no document.",
        f"f(x, y, *, out=None)\n\n{LONG}",
        f"Too short.\n\n{LONG}",
        f"{'Far too long for a summary ' * 20}.\n\n{LONG}",
    ],
)
def test_what_is_no_sentence_or_has_no_details_gives_no_example(docstring):
    assert list(documented(f'def f():\n    """{docstring}"""')) == []


@pytest.mark.parametrize("source", ['"""', "x = 1", f'def {{{{f}}}}:\n    """{LONG}"""', ""])
def test_what_is_no_python_gives_no_example(source):
    assert list(documented(source)) == []


def test_copies_are_taken_once_and_the_order_does_not_depend_on_the_place(tmp_path):
    for place in ("here", "there"):
        root = tmp_path / place
        root.mkdir()
        for number in range(30):
            text = f'def f():\n    """{SUMMARY[:-1]} {number}.\n\n    {number} {LONG}"""'
            (root / f"module_{number}.py").write_text(text)
            (root / f"zcopy_{number}.py").write_text(text)
    made = [make_examples([Subsystem("tree", tmp_path / place)]) for place in ("here", "there")]
    assert made[0] == made[1]
    assert sum(map(len, made[0].values())) == 30
