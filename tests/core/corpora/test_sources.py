"""Claims about addresses of data: which files a split is, and what TFDS has prepared."""

import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from bigbird.core.corpora import builtin_documents, builtin_summaries
from bigbird.core.corpora.record_files import DataError
from bigbird.core.corpora.sources import find_files, open_records


def touch(directory, *names):
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def found(directory, split):
    return [path.removeprefix(f"{directory}/") for path in find_files(str(directory), split)]


@pytest.mark.parametrize(
    ("split", "names"),
    [
        ("train", ["imdb-train.tfrecord-00000-of-00002", "imdb-train.tfrecord-00001-of-00002"]),
        ("test", ["imdb-test.tfrecord-00000-of-00001"]),
        ("validation", ["dev/part-0.tfrecord"]),
    ],
)
def test_split_is_a_word_of_the_file_or_its_folder(tmp_path, split, names):
    touch(
        tmp_path / "latest-test-data",
        "imdb-train.tfrecord-00001-of-00002",
        "imdb-train.tfrecord-00000-of-00002",
        "imdb-test.tfrecord-00000-of-00001",
        "dev/part-0.tfrecord",
        "contest-pretrained.tfrecord",
        "label.labels.txt",
        ".hidden/..tfrecord",
        "dataset_info.json",
    )
    assert found(tmp_path / "latest-test-data", split) == names


def test_files_that_name_no_split_are_training_files_only(tmp_path):
    touch(tmp_path, "part-1.jsonl", "part-0.jsonl", "test.jsonl")
    assert found(tmp_path, "train") == ["part-0.jsonl", "part-1.jsonl"]
    assert found(tmp_path, "test") == ["test.jsonl"]
    with pytest.raises(DataError, match="3 data files, but none of the split validation"):
        find_files(str(tmp_path), "validation")


def test_single_file_serves_every_split(tmp_path):
    touch(tmp_path, "documents.csv")
    path = str(tmp_path / "documents.csv")
    for split in ("train", "test", None):
        assert find_files(path, split) == [path]


@pytest.mark.parametrize("address", ["/no/such/place", "", "unheard://of"])
def test_place_that_does_not_exist_is_named(address):
    with pytest.raises(DataError, match=f"--data_dir={address}: "):
        find_files(address, "train")


def test_directory_without_data_and_unknown_kinds_are_told(tmp_path):
    touch(tmp_path, "train.json")
    with pytest.raises(DataError, match=r"holds no \*.tfrecord"):
        find_files(str(tmp_path), "train")
    with pytest.raises(DataError, match=r"ending in \.jsonl"):
        find_files(str(tmp_path / "train.json"), "train")


def test_files_of_two_kinds_are_refused(tmp_path):
    touch(tmp_path, "train.jsonl", "train.csv")
    with pytest.raises(DataError, match="several kinds .csv, jsonl."):
        find_files(str(tmp_path), "train")


def test_class_names_of_a_directory_are_those_of_its_training_split(tmp_path, write_jsonl):
    write_jsonl(tmp_path / "train.jsonl", [{"text": "a", "label": name} for name in "zyx"])
    write_jsonl(tmp_path / "test.jsonl", [{"text": "a", "label": "z"}])
    source = open_records(str(tmp_path), "test", ("text", "label"))
    assert source.label_names == ["x", "y", "z"]
    assert [int(record["label"]) for record in source.records()] == [2]


@pytest.mark.parametrize(
    "address",
    ["builtin://novels", "builtin://documents?limit=0", "builtin://documents?size=3", "builtin://"],
)
def test_builtin_address_that_is_none_is_told(address):
    with pytest.raises(DataError, match="expected builtin://documents"):
        open_records(address, "train", ("text", "label"))


def test_builtin_documents_are_read_up_to_the_limit(tmp_path, monkeypatch, write_jsonl):
    monkeypatch.setattr(builtin_documents, "prepare", lambda: tmp_path)
    for split in builtin_documents.SPLITS:
        write_jsonl(tmp_path / f"{split}.jsonl", [{"text": split, "label": n} for n in "abcde"])
    whole = open_records("builtin://documents", "test", ("text", "label"))
    few = open_records("builtin://documents?limit=2", "test", ("text", "label"))
    assert [r["label"] for r in whole.records().as_numpy_iterator()] == [0, 1, 2, 3, 4]
    assert [r["label"] for r in few.records().as_numpy_iterator()] == [0, 1]
    assert few.label_names == list("abcde")
    with pytest.raises(DataError, match="has the splits train, validation, test; received dev"):
        open_records("builtin://documents", "dev", ("text", "label"))


def test_builtin_summaries_are_read_up_to_the_limit(tmp_path, monkeypatch, write_jsonl):
    monkeypatch.setattr(builtin_summaries, "prepare", lambda: tmp_path)
    pair = {"document": "long", "summary": "short", "file": "a.py"}
    write_jsonl(tmp_path / "validation.jsonl", [pair] * 3)
    source = open_records("builtin://summaries?limit=2", "validation", ("document", "summary"))
    assert (
        list(source.records().as_numpy_iterator())
        == [{"document": b"long", "summary": b"short"}] * 2
    )


@pytest.fixture(scope="module")
def tfds_dir(tmp_path_factory):
    """A data set in the layout that TFDS prepares."""
    directory = tmp_path_factory.mktemp("tfds")
    features = tfds.features.FeaturesDict(
        {
            "article": tfds.features.Text(),
            "label": tfds.features.ClassLabel(names=["neg", "pos"]),
            "pair": tfds.features.Tensor(shape=(2,), dtype=tf.int64),
        }
    )
    examples = tf.data.Dataset.from_tensor_slices(
        {
            "article": [f"text {i}" for i in range(5)],
            "label": [i % 2 for i in range(5)],
            "pair": tf.zeros([5, 2], tf.int64),
        }
    )
    tfds.dataset_builders.store_as_tfds_dataset(
        name="tiny_reviews",
        version="1.0.0",
        features=features,
        split_datasets={"train": examples},
        config="plain_text",
        data_dir=directory,
        disable_shuffling=True,
    )
    return str(directory)


def test_prepared_tfds_data_set_is_read_without_network(tfds_dir):
    source = open_records(
        "tfds://tiny_reviews/plain_text", "train", ("document", "label"), tfds_dir
    )
    assert source.label_names == ["neg", "pos"]
    assert list(source.records().as_numpy_iterator()) == [
        {"document": f"text {i}".encode(), "label": i % 2} for i in range(5)
    ]


def test_directory_that_tfds_prepared_is_read_as_tfrecords_too(tfds_dir):
    source = open_records(tfds_dir, "train", ("document", "label"))
    assert len(list(source.records())) == 5


def test_tfds_data_set_that_is_not_prepared_is_told_and_not_downloaded(tmp_path):
    with pytest.raises(DataError, match="is not prepared.*--tfds_data_dir.*download_and_prepare"):
        open_records("tfds://imdb_reviews/plain_text", "train", ("text",), str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "split", "field", "told"),
    [
        ("no_such_set", "train", "text", "tfds://no_such_set: "),
        ("tiny_reviews/plain_text", "test", "document", "has the splits train; received test"),
        ("tiny_reviews/plain_text", "train", "summary", "expected the field summary or abstract"),
        ("tiny_reviews/plain_text", "train", "pair", "expected pair to be one string; it is"),
    ],
)
def test_what_a_tfds_data_set_lacks_is_told(tfds_dir, name, split, field, told):
    with pytest.raises(DataError) as caught:
        open_records(f"tfds://{name}", split, (field,), tfds_dir)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
