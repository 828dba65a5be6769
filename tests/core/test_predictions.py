"""Claims about predictions of a file: none is lost or made twice, whatever kills the process."""

import fcntl
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from bigbird.core.data import ExampleSource
from bigbird.core.predictions import predict_to_file, read_predictions

IDENTITY = {"step": 3, "beam_size": 4}


def numbers(count):
    values = tf.data.Dataset.range(count).map(lambda n: {"text": tf.strings.as_string(n)})
    return ExampleSource(values, count, None, "numbers")


def doubled(batch):
    return [{"twice": 2 * int(text)} for text in batch["text"]]


def killed_after(batches):
    """Predicts, and fails at the batch behind the first `batches`."""
    seen = []

    def predict(batch):
        if len(seen) == batches:
            raise KeyboardInterrupt
        seen.append(batch)
        return doubled(batch)

    return predict


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "out" / "predictions.jsonl")


@pytest.fixture
def partial(path):
    """The file of a prediction of ten numbers that was stopped after two batches of three."""
    with pytest.raises(KeyboardInterrupt):
        predict_to_file(numbers(10), killed_after(2), path, IDENTITY, 3)
    assert not os.path.exists(path)
    return f"{path}.partial"


def expected(count):
    return [{"index": i, "twice": 2 * i} for i in range(count)]


@pytest.mark.parametrize("count", [1, 6, 7])
def test_every_example_has_one_line_in_order(path, count):
    predict_to_file(numbers(count), doubled, path, IDENTITY, 3)
    assert read_predictions(path) == expected(count)
    assert os.listdir(os.path.dirname(path)) == ["predictions.jsonl"]


def test_goes_on_after_the_last_batch_that_was_written(path, partial):
    batches = []

    def predict(batch):
        batches.append([int(text) for text in batch["text"]])
        return doubled(batch)

    predict_to_file(numbers(10), predict, path, IDENTITY, 3)
    assert batches == [[6, 7, 8], [9]]
    assert read_predictions(path) == expected(10)


@pytest.mark.parametrize("torn", range(0, 140, 7))
def test_torn_anywhere_it_ends_as_if_it_had_not_been(path, partial, torn):
    with open(partial, "r+b") as file:
        file.truncate(min(torn, os.path.getsize(partial)))
    predict_to_file(numbers(10), doubled, path, IDENTITY, 3)
    assert read_predictions(path) == expected(10)


def test_damaged_lines_are_made_again(path, partial):
    with open(partial, "r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\0" * 5)
    predict_to_file(numbers(10), doubled, path, IDENTITY, 3)
    assert read_predictions(path) == expected(10)


@pytest.mark.parametrize(
    ("identity", "count", "batch_size", "told"),
    [
        ({**IDENTITY, "step": 4}, 10, 3, "step: 3 there, 4 here"),
        (IDENTITY, 11, 3, "input: "),
        (IDENTITY, 10, 2, "batch_size: 3 there, 2 here"),
    ],
)
def test_the_beginning_of_another_prediction_is_neither_taken_up_nor_lost(
    path, partial, identity, count, batch_size, told
):
    before = open(partial, "rb").read()
    with pytest.raises(ValueError, match=told):
        predict_to_file(numbers(count), doubled, path, identity, batch_size)
    assert open(partial, "rb").read() == before


def test_a_finished_file_stays_until_the_next_is_whole(path):
    predict_to_file(numbers(4), doubled, path, IDENTITY, 3)
    with pytest.raises(KeyboardInterrupt):
        predict_to_file(numbers(10), killed_after(1), path, IDENTITY, 3)
    assert read_predictions(path) == expected(4)
    predict_to_file(numbers(10), doubled, path, IDENTITY, 3)
    assert read_predictions(path) == expected(10)


def test_two_processes_do_not_write_one_file(path, partial):
    with open(partial, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="Another process is writing to"):
            predict_to_file(numbers(10), doubled, path, IDENTITY, 3)


def test_a_remote_path_is_told():
    with pytest.raises(ValueError, match="local file; received gs://bucket/out.jsonl"):
        predict_to_file(numbers(1), doubled, "gs://bucket/out.jsonl", IDENTITY, 1)


def test_arrays_of_every_field_reach_the_prediction(path):
    values = {"document": tf.constant(["a", "b"]), "label": tf.constant([1, 2], tf.int64)}
    source = ExampleSource(tf.data.Dataset.from_tensor_slices(values), 2, None, "pairs")

    def predict(batch):
        assert batch["document"].tolist() == [b"a", b"b"]
        np.testing.assert_array_equal(batch["label"], [1, 2])
        return [{}, {}]

    predict_to_file(source, predict, path, IDENTITY, 2)
    assert read_predictions(path) == [{"index": 0}, {"index": 1}]


def test_kill_9_loses_no_prediction_and_makes_none_twice(path, tmp_path):
    program = (
        "import os, signal, sys\n"
        "import tensorflow as tf\n"
        "from bigbird.core.data import ExampleSource\n"
        "from bigbird.core.predictions import predict_to_file\n"
        "values = tf.data.Dataset.range(10).map(lambda n: {'text': tf.strings.as_string(n)})\n"
        "def predict(batch):\n"
        "    if b'6' in batch['text']:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return [{'twice': 2 * int(text)} for text in batch['text']]\n"
        "predict_to_file(ExampleSource(values, 10, None, ''), predict, sys.argv[1], {}, 2)\n"
    )
    run = subprocess.run([sys.executable, "-c", program, path], capture_output=True)
    assert run.returncode == -signal.SIGKILL, run.stderr[-2000:]
    made = []

    def predict(batch):
        made.extend(int(text) for text in batch["text"])
        return doubled(batch)

    predict_to_file(numbers(10), predict, path, {}, 2)
    assert made == [6, 7, 8, 9]
    assert read_predictions(path) == expected(10)
