"""Claims about records in files: every kind gives the same fields, and a fault is located."""

import csv

import pytest
import tensorflow as tf

from bigbird.core.corpora.record_files import DataError, TextFiles, TFRecordFiles

RECORDS = [{"text": "one\nline, two", "label": 1}, {"text": "", "label": 0}]


def read(path, fields=("text", "label"), label_files=None):
    if ".tfrecord" in path.name:
        source = TFRecordFiles([str(path)], fields)
    else:
        source = TextFiles([str(path)], fields, label_files or [str(path)])
    return list(source.records().as_numpy_iterator())


def fault_of(path, fields=("text", "label")):
    """The message of the error that opening a file and locating its fault gives."""
    with pytest.raises(DataError) as caught:
        if ".tfrecord" in path.name:
            TFRecordFiles([str(path)], fields).locate_fault()
        else:
            TextFiles([str(path)], fields, []).locate_fault()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["tfrecord", "jsonl", "csv"])
def test_every_kind_of_file_gives_the_same_records(kind, tmp_path, request):
    path = tmp_path / f"data.{kind}"
    request.getfixturevalue(f"write_{kind}")(path, RECORDS)
    assert read(path) == [{"text": b"one\nline, two", "label": 1}, {"text": b"", "label": 0}]


@pytest.mark.parametrize("kind", ["tfrecord", "jsonl", "csv"])
def test_article_and_abstract_are_document_and_summary(kind, tmp_path, request):
    path = tmp_path / f"data.{kind}"
    request.getfixturevalue(f"write_{kind}")(path, [{"article": "long", "abstract": "short"}])
    assert read(path, ("document", "summary")) == [{"document": b"long", "summary": b"short"}]


@pytest.mark.parametrize("kind", ["tfrecord", "jsonl", "csv"])
def test_missing_field_is_told_with_file_and_what_is_there(kind, tmp_path, request):
    path = tmp_path / f"data.{kind}"
    request.getfixturevalue(f"write_{kind}")(path, [{"body": "text", "label": 0}])
    message = fault_of(path)
    assert f"data.{kind}, " in message
    assert "field text" in message and "body" in message


def test_field_missing_from_a_later_tfrecord_is_told_with_its_record(tmp_path, write_tfrecord):
    path = tmp_path / "data.tfrecord"
    write_tfrecord(path, [*RECORDS, {"text": "without label"}])
    assert "data.tfrecord, record 2: expected the field label" in fault_of(path)


def test_tfrecord_field_of_the_wrong_type_is_told(tmp_path, write_tfrecord):
    path = tmp_path / "data.tfrecord"
    write_tfrecord(path, [RECORDS[0], {"text": "text", "label": "1"}])
    assert "record 1: expected label to be a int64_list of one value; it is bytes_list" in (
        fault_of(path)
    )


def test_truncated_tfrecord_is_told_with_file_and_record(tmp_path, write_tfrecord):
    path = tmp_path / "data.tfrecord"
    write_tfrecord(path, RECORDS * 3)
    path.write_bytes(path.read_bytes()[:-7])
    assert "data.tfrecord, record 5 cannot be read: the file is truncated" in fault_of(path)


def test_flipped_byte_of_a_tfrecord_is_told_with_file_and_record(tmp_path, write_tfrecord):
    path = tmp_path / "data.tfrecord"
    write_tfrecord(path, RECORDS)
    content = bytearray(path.read_bytes())
    content[content.index(b"one")] ^= 1
    path.write_bytes(content)
    assert "data.tfrecord, record 0 cannot be read" in fault_of(path)


def test_file_that_is_no_tfrecord_is_told(tmp_path):
    path = tmp_path / "data.tfrecord"
    path.write_text("these are no records " * 10)
    assert "data.tfrecord, record 0 cannot be read" in fault_of(path)


def test_record_that_is_no_example_is_told(tmp_path):
    path = tmp_path / "data.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(b"\xff\xff\xff")
    assert "data.tfrecord, record 0 is not a tf.train.Example" in fault_of(path)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"text": "cut off', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('["text"]', "expected a JSON object"),
        ('{"text": 3, "label": 0}', "expected text to be a string; received 3"),
        ('{"text": null, "label": 0}', "expected text to be a string; received None"),
        ('{"text": "a", "label": 0.5}', "expected an integer or a class name as label"),
        ('{"text": "a", "label": true}', "expected an integer or a class name as label"),
        ('{"text": "a"}', "expected the field label; it has text"),
    ],
)
def test_bad_json_line_is_told_with_its_number(tmp_path, line, told):
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"text": "fine", "label": 0}}\n\n{line}\n')
    message = fault_of(path)
    assert "data.jsonl, line 3" in message and told in message


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("only one column", "expected 2 columns (text, label); received 1"),
        ("a,0,more", "expected 2 columns (text, label); received 3"),
        ('"never closed,0', "not valid CSV"),
    ],
)
def test_bad_csv_row_is_told_with_its_line(tmp_path, rows, told):
    path = tmp_path / "data.csv"
    path.write_text(f"text,label\nfine,0\n{rows}\n")
    message = fault_of(path)
    assert "data.csv, line 3" in message and told in message


def test_csv_documents_may_be_longer_than_the_csv_modules_limit(tmp_path, write_csv):
    limit = csv.field_size_limit()
    path = tmp_path / "data.csv"
    write_csv(path, [{"text": "word " * limit, "label": 0}])
    assert len(read(path)[0]["text"]) == 5 * limit
    assert csv.field_size_limit() == limit


def test_byte_order_mark_and_line_ends_of_other_systems_are_accepted(tmp_path):
    for name, content in (
        ("data.csv", b"text,label\r\na b,1\r\n\r\n"),
        ("data.jsonl", b'{"text": "a b", "label": 1}\r\n\r\n'),
    ):
        path = tmp_path / name
        path.write_bytes(b"\xef\xbb\xbf" + content)
        assert read(path) == [{"text": b"a b", "label": 1}]


def test_plain_lines_are_documents_even_empty_ones(tmp_path):
    path = tmp_path / "data.txt"
    path.write_bytes(b"first\r\n\nthird")
    assert [record["text"] for record in read(path, ("text",))] == [b"first", b"", b"third"]


def test_nul_is_part_of_a_text(tmp_path):
    json_path, csv_path = tmp_path / "data.jsonl", tmp_path / "data.csv"
    json_path.write_text('{"text": "a\\u0000b"}\n')
    csv_path.write_bytes(b"text\na\0b\n")
    assert read(json_path, ("text",)) == [{"text": b"a\0b"}]
    assert read(csv_path, ("text",)) == [{"text": "a\ufffdb".encode()}]


def test_class_names_are_numbered_in_the_sorted_order_of_the_training_file(tmp_path, write_jsonl):
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    write_jsonl(train, [{"text": "a", "label": name} for name in ("pos", "neg", "mixed")])
    write_jsonl(test, [{"text": "a", "label": "pos"}])
    assert read(test, label_files=[str(train)])[0]["label"] == 2
    source = TextFiles([str(test)], ("text", "label"), [str(train)])
    assert source.label_names == ["mixed", "neg", "pos"]


@pytest.mark.parametrize("training_labels", [["pos", "neg"], ["0", "1"]])
def test_label_unknown_to_the_training_file_is_told(tmp_path, write_jsonl, training_labels):
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    write_jsonl(train, [{"text": "a", "label": label} for label in training_labels])
    write_jsonl(test, [{"text": "a", "label": "other"}])
    source = TextFiles([str(test)], ("text", "label"), [str(train)])
    with pytest.raises(DataError, match="test.jsonl, line 1: the label 'other' is none of"):
        source.locate_fault()


def test_integers_written_as_strings_are_integers(tmp_path, write_csv):
    path = tmp_path / "data.csv"
    write_csv(path, [{"text": "a", "label": label} for label in ("1", " 0", "10")])
    assert [record["label"] for record in read(path)] == [1, 0, 10]
