"""Claims about the built-in documents: long, balanced, always the same, not told by their start."""

import collections
import itertools
import json

import numpy as np
import pytest
import sentencepiece
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from bigbird.core.corpora import builtin_documents
from bigbird.core.corpora.builtin_documents import (
    Subsystem,
    cut_passages,
    make_documents,
    prepare,
    split_of,
    train_vocabulary,
)

PARAGRAPH = "def function():\n    return " + "value + " * 120 + "0"


@pytest.fixture(scope="module")
def folder():
    return prepare()


@pytest.fixture(scope="module")
def documents(folder):
    return {
        split: [json.loads(line) for line in (folder / f"{split}.jsonl").open(encoding="utf-8")]
        for split in builtin_documents.SPLITS
    }


@pytest.fixture(scope="module")
def pieces(folder, documents):
    """Split -> ids of the pieces of each document."""
    vocabulary = sentencepiece.SentencePieceProcessor(
        model_file=str(folder / builtin_documents.VOCABULARY_FILE)
    )
    return {
        split: vocabulary.encode([document["text"] for document in of_split], num_threads=2)
        for split, of_split in documents.items()
    }


def test_there_are_a_thousand_documents_of_two_thousand_tokens(pieces):
    lengths = [len(ids) for of_split in pieces.values() for ids in of_split]
    assert len(lengths) >= 1000
    assert np.median(lengths) >= 2000


def test_labels_are_equally_frequent_in_every_split(documents):
    for of_split in documents.values():
        counts = collections.Counter(document["label"] for document in of_split)
        assert len(counts) == 5
        assert len(set(counts.values())) == 1


def test_no_source_file_is_in_two_splits(documents):
    files = {
        split: {file for document in of_split for file in document["files"]}
        for split, of_split in documents.items()
    }
    assert not files["train"] & files["test"]
    assert not files["train"] & files["validation"]
    assert not files["validation"] & files["test"]


def test_a_document_opens_elsewhere_and_goes_on_with_its_label(documents):
    for document in itertools.chain.from_iterable(documents.values()):
        subsystems = [file.split("/")[0] for file in document["files"]]
        assert subsystems[2:] == [document["label"]] * 6
        assert len({*subsystems[:2], document["label"]}) == 3


def test_every_subsystem_opens_equally_many_documents_of_every_label(documents):
    openings = collections.Counter(
        (file.split("/")[0], document["label"])
        for document in itertools.chain.from_iterable(documents.values())
        for file in document["files"][:2]
    )
    assert len(openings) == 20
    # In a round of four, (a, b), (b, c), (c, d), (d, a), the counts are up to two apart, and each
    # split may end within one.
    assert max(openings.values()) - min(openings.values()) <= 2 * len(builtin_documents.SPLITS)


def test_licence_headers_are_left_out(documents):
    for of_split in documents.values():
        for document in of_split:
            assert "Licensed under the Apache License" not in document["text"]


def test_start_of_a_document_tells_its_label_much_worse_than_the_whole(documents, pieces):
    # Part of the documents is enough to tell; the benchmark measures with all of them.
    train, test = slice(0, 400), slice(0, 100)
    labels = {split: [document["label"] for document in documents[split]] for split in documents}

    def accuracy(length):
        model = make_pipeline(
            TfidfVectorizer(analyzer=lambda ids: ids[:length], sublinear_tf=True),
            LogisticRegression(C=10.0),
        )
        model.fit(pieces["train"][train], labels["train"][train])
        return model.score(pieces["test"][test], labels["test"][test])

    whole = accuracy(4096)
    assert whole > 0.8
    assert accuracy(512) < whole - 0.3


def test_vocabulary_has_the_special_ids_of_2021(folder):
    vocabulary = sentencepiece.SentencePieceProcessor(
        model_file=str(folder / builtin_documents.VOCABULARY_FILE)
    )
    assert vocabulary.get_piece_size() == builtin_documents.VOCABULARY_SIZE
    ids = vocabulary.pad_id(), vocabulary.eos_id(), vocabulary.bos_id()
    assert ids == (0, 1, 2)
    assert [vocabulary.id_to_piece(i) for i in (65, 66, 67)] == ["[CLS]", "[SEP]", "[MASK]"]
    assert not {65, 66, 67} & set(vocabulary.encode("[CLS] [SEP] [MASK]"))


def test_vocabulary_training_is_deterministic():
    texts = [PARAGRAPH, "import numpy", "class Layer"] * 5
    assert train_vocabulary(texts, 110) == train_vocabulary(iter(texts), 110)


def test_second_call_makes_nothing(folder):
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert prepare() == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def write_tree(root, files=40):
    for number in range(files):
        body = f"def name_{number}():\n    return {number}\n\n{PARAGRAPH}\n\n" * 9
        (root / f"module_{number}.py").write_text(f'"""Licence."""\nimport os\n\n{body}')


@pytest.fixture
def trees(tmp_path):
    roots = [tmp_path / name for name in ("first", "second")]
    for root in roots:
        root.mkdir()
        write_tree(root)
    return [Subsystem(root.name, root, frozenset({"skipped"})) for root in roots]


def test_same_sources_give_the_same_documents_wherever_they_lie(trees, tmp_path):
    once = make_documents(trees)
    moved = tmp_path / "elsewhere"
    trees[0].root.rename(moved)
    again = make_documents([Subsystem("first", moved, frozenset()), trees[1]])
    assert once == again
    assert once["train"]


def test_skipped_folders_undecodable_and_generated_files_are_left_out(trees):
    before = make_documents(trees)
    root = trees[0].root
    (root / "skipped").mkdir()
    write_tree(root / "skipped", files=3)
    (root / "latin.py").write_bytes(b"def f():\n    return '\xe9'\n\n" + PARAGRAPH.encode() * 9)
    (root / "gen_ops.py").write_text(f"{PARAGRAPH}\n\n" * 9)
    assert make_documents(trees) == before


def test_passages_are_whole_paragraphs_after_the_header():
    source = f'"""Licence."""\nimport os\n\n{PARAGRAPH}\n\n\n    indented\n\n{PARAGRAPH}\n\nrest\n'
    assert list(cut_passages(source)) == [f"{PARAGRAPH}\n\n    indented\n\n{PARAGRAPH}"]


def test_paragraph_of_extreme_length_makes_no_passage():
    table = "table = [" + "0, " * 2000 + "]"
    assert list(cut_passages(f"def f(): pass\n\n{table}\n")) == []
    assert list(cut_passages("value = 1\n" * 1000)) == []


def test_splits_have_their_shares():
    counts = collections.Counter(split_of(f"package/module_{i}.py") for i in range(2000))
    assert counts["train"] == pytest.approx(1500, abs=80)
    assert counts["validation"] == pytest.approx(200, abs=50)
    assert counts["test"] == pytest.approx(300, abs=60)


def test_failure_leaves_nothing_behind(tmp_path, monkeypatch, trees):
    def fail(texts):
        raise RuntimeError("out of memory")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(builtin_documents, "installed_subsystems", lambda: trees)
    monkeypatch.setattr(builtin_documents, "train_vocabulary", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        prepare()
    assert list((tmp_path / "bigbird" / "builtin").iterdir()) == []


def test_two_processes_at_once_end_with_one_folder(tmp_path, monkeypatch, trees):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(builtin_documents, "installed_subsystems", lambda: trees)
    monkeypatch.setattr(builtin_documents, "VOCABULARY_SIZE", 110)
    real = builtin_documents.train_vocabulary

    def train_while_another_process_finishes(texts):
        monkeypatch.setattr(builtin_documents, "train_vocabulary", real)
        prepare()
        return real(texts, 110)

    monkeypatch.setattr(builtin_documents, "train_vocabulary", train_while_another_process_finishes)
    directory = prepare()
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]
    assert (directory / builtin_documents.VOCABULARY_FILE).exists()
