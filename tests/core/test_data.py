"""Claims about data sets: checked before use, batched, and resumed exactly."""

import json
import re

import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from hypothesis import given, settings
from hypothesis import strategies as st

from bigbird.core import data
from bigbird.core.corpora.record_files import DataError
from bigbird.core.data import (
    ExampleSource,
    classification_dataset,
    encode_documents,
    endless_examples,
    open_source,
)
from bigbird.core.vocabulary import SpecialTokens, Tokenizer

SPECIAL = SpecialTokens()
FIELDS = ("text", "label")


@pytest.fixture(scope="module")
def tokenizer(vocabulary_file):
    return Tokenizer(vocabulary_file)


def numbered_source(count):
    """A source of `count` examples whose labels are their places."""
    words = tf.constant([f"token {'window ' * (i % 5)}" for i in range(count)])
    records = {"text": words, "label": tf.range(count, dtype=tf.int64)}
    return ExampleSource(tf.data.Dataset.from_tensor_slices(records), count, None, "numbers")


def labels_of(dataset):
    return [int(example["label"]) for example in dataset]


class TestOpenSource:
    """`open_source` refuses data that training would stumble on."""

    def test_counts_examples_and_keeps_empty_documents(self, tmp_path, write_jsonl):
        write_jsonl(tmp_path / "train.jsonl", [{"text": t, "label": 0} for t in ("a", "", "c")])
        source = open_source(str(tmp_path), "train", FIELDS)
        assert source.num_examples == 3
        assert [e["text"] for e in source.dataset.as_numpy_iterator()] == [b"a", b"", b"c"]

    @pytest.mark.parametrize(
        ("name", "content"), [("a.tfrecord", ""), ("a.jsonl", "\n"), ("a.csv", "text,label\n")]
    )
    def test_refuses_zero_examples(self, tmp_path, name, content):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=f"{name} holds no examples"):
            open_source(str(tmp_path / name), "train", FIELDS)

    @pytest.mark.parametrize("label", [2, -1, 2**40])
    @pytest.mark.parametrize("kind", ["tfrecord", "jsonl", "csv"])
    def test_names_the_first_example_whose_label_is_out_of_range(
        self, tmp_path, request, kind, label
    ):
        path = tmp_path / f"a.{kind}"
        records = [{"text": "a", "label": value} for value in (0, 1, label, 7)]
        request.getfixturevalue(f"write_{kind}")(path, records)
        with pytest.raises(
            DataError, match=rf"example 2 .* below --num_labels=2; received {label}\."
        ):
            open_source(str(path), "train", FIELDS, num_labels=2)

    def test_locates_a_truncated_tfrecord(self, tmp_path, write_tfrecord):
        for part in range(2):
            write_tfrecord(tmp_path / f"train-{part}.tfrecord", [{"text": "a", "label": 0}] * 3)
        path = tmp_path / "train-1.tfrecord"
        path.write_bytes(path.read_bytes()[:-5])
        with pytest.raises(DataError, match="train-1.tfrecord, record 2 cannot be read"):
            open_source(str(tmp_path), "train", FIELDS)

    def test_locates_a_bad_line(self, tmp_path):
        path = tmp_path / "train.jsonl"
        path.write_text('{"text": "a"}\n{"text"\n')
        with pytest.raises(DataError, match="train.jsonl, line 2 is not valid JSON"):
            open_source(str(path), "train", ("text",))

    def test_replaces_and_counts_bytes_that_are_not_utf8(self, tmp_path, write_tfrecord, caplog):
        logging.use_absl_handler()
        json_path, record_path = tmp_path / "a.jsonl", tmp_path / "a.tfrecord"
        json_path.write_bytes(
            b'{"text": "a\xffb"}\n{"text": "\\ud800"}\n{"text": "ok \xef\xbf\xbd"}\n'
        )
        write_tfrecord(
            record_path, [{"text": b"a\xffb"}, {"text": b"\xed\xa0\x80"}, {"text": "ok"}]
        )
        for path in (json_path, record_path):
            with caplog.at_level("WARNING"):
                caplog.clear()
                source = open_source(str(path), "train", ("text",))
            assert "2 of 3 examples hold bytes that are not UTF-8" in caplog.text
            texts = [e["text"].decode() for e in source.dataset.as_numpy_iterator()]
            # A bad byte may become several replacement characters, by how the file stored it.
            assert re.fullmatch("a\ufffd+b", texts[0])
            assert re.fullmatch("\ufffd+", texts[1])

    def test_serves_any_fields(self, tmp_path, write_jsonl):
        write_jsonl(tmp_path / "a.jsonl", [{"article": "long", "abstract": "short", "id": 3}])
        source = open_source(str(tmp_path / "a.jsonl"), None, ("document", "summary"))
        assert list(source.dataset.as_numpy_iterator()) == [
            {"document": b"long", "summary": b"short"}
        ]


class TestEndlessExamples:
    """The training order depends on (seed, epoch) and nothing else."""

    def test_every_epoch_has_every_example_once_in_another_order(self):
        labels = labels_of(endless_examples(numbered_source(20), seed=3).take(60))
        epochs = [labels[i : i + 20] for i in (0, 20, 40)]
        assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
        assert epochs[0] != epochs[1] != epochs[2] != list(range(20))

    @settings(max_examples=6)
    @given(
        count=st.integers(1, 12),
        start=st.integers(0, 40),
        seed=st.integers(0, 2**31 - 1),
        window=st.sampled_from([1, 5, 8192]),
    )
    def test_stream_from_a_start_is_the_rest_of_the_whole_stream(self, count, start, seed, window):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(data, "SHUFFLE_WINDOW", window)
            source = numbered_source(count)
            whole = labels_of(endless_examples(source, seed).take(start + 7))
            assert labels_of(endless_examples(source, seed, start).take(7)) == whole[start:]

    def test_order_is_independent_of_the_global_seed_and_known(self):
        orders = []
        for global_seed in (1, 2):
            tf.random.set_seed(global_seed)
            orders.append(labels_of(endless_examples(numbered_source(8), seed=5).take(8)))
        # Written down so that a change of the order, which breaks resuming, does not go unseen.
        assert orders[0] == orders[1] == [7, 1, 5, 0, 2, 4, 3, 6]

    def test_other_seed_gives_another_order(self):
        one, other = (
            labels_of(endless_examples(numbered_source(30), seed).take(30)) for seed in (0, 1)
        )
        assert one != other

    def test_windows_are_shuffled_apart(self, monkeypatch):
        monkeypatch.setattr(data, "SHUFFLE_WINDOW", 10)
        labels = labels_of(endless_examples(numbered_source(25), seed=0).take(25))
        assert sorted(labels[:10]) == list(range(10))
        assert sorted(labels[20:]) == list(range(20, 25))
        assert [label - 10 for label in labels[10:20]] != labels[:10]


class TestEncodeDocuments:
    """Documents become `[CLS] pieces [SEP]`, cut and padded."""

    def test_frames_cuts_and_pads(self, tokenizer):
        text = ["sparse attention block window memory gradient", "token", ""]
        pieces = tokenizer.tokenize(text).to_list()
        ids = encode_documents(text, tokenizer, SPECIAL, 6).numpy()
        assert ids.dtype == np.int32
        assert ids[0].tolist() == [65, *pieces[0][:4], 66]
        assert ids[1].tolist() == [65, *pieces[1], 66, *[0] * (4 - len(pieces[1]))]
        assert ids[2].tolist() == [65, 66, 0, 0, 0, 0]

    @pytest.mark.parametrize(("block_size", "length"), [(1, 5), (4, 8), (64, 10)])
    def test_pads_to_the_longest_rounded_up_to_blocks(self, tokenizer, block_size, length):
        text = ["token token token", "token"]
        ids = encode_documents(
            text, tokenizer, SPECIAL, 10, pad_to_longest=True, block_size=block_size
        )
        whole = encode_documents(text, tokenizer, SPECIAL, 10)
        assert ids.shape == (2, length)
        assert ids.numpy().tolist() == whole[:, :length].numpy().tolist()

    def test_empty_batch_has_no_rows(self, tokenizer):
        for pad_to_longest in (True, False):
            ids = encode_documents(
                tf.zeros([0], tf.string), tokenizer, SPECIAL, 8, pad_to_longest=pad_to_longest
            )
            assert ids.shape[0] == 0

    @pytest.mark.parametrize("substitute", [" window ", r"\1 \n", ""])
    def test_line_breaks_are_substituted_literally(self, tokenizer, substitute):
        with_breaks = encode_documents(["a\nb\r\nc"], tokenizer, SPECIAL, 32, substitute)
        without = encode_documents([f"a{substitute}b{substitute}c"], tokenizer, SPECIAL, 32)
        assert with_breaks.numpy().tolist() == without.numpy().tolist()

    def test_other_special_ids_are_used(self, tokenizer):
        special = SpecialTokens(pad=3, cls=70, sep=71)
        ids = encode_documents([""], tokenizer, special, 4)
        assert ids.numpy().tolist() == [[70, 71, 3, 3]]

    def test_refuses_special_ids_outside_the_vocabulary(self, tokenizer):
        with pytest.raises(ValueError, match="cls=9999.*--cls_id"):
            encode_documents([""], tokenizer, SpecialTokens(cls=9999), 4)

    def test_refuses_a_length_without_room_for_text(self, tokenizer):
        with pytest.raises(ValueError, match="max_encoder_length=2.*--max_encoder_length"):
            encode_documents([""], tokenizer, SPECIAL, 2)

    def test_huge_document_is_cut(self, tokenizer):
        ids = encode_documents([b"sparse attention\0\n" * 200_000], tokenizer, SPECIAL, 16)
        assert ids.shape == (1, 16) and ids[0, -1] == 66

    def test_exported_encoder_gives_the_same_ids(self, tokenizer, tmp_path):
        module = tf.Module()
        module.encode = tf.function(
            lambda text: encode_documents(text, tokenizer, SPECIAL, 8),
            input_signature=[tf.TensorSpec([None], tf.string)],
        )
        tf.saved_model.save(module, str(tmp_path / "export"))
        text = tf.constant(["sparse block", "\0 x"])
        loaded = tf.saved_model.load(str(tmp_path / "export"))
        assert loaded.encode(text).numpy().tolist() == module.encode(text).numpy().tolist()


class TestClassificationDataset:
    """Batches for training and evaluation."""

    def test_evaluation_gives_every_example_once_in_order(self, tokenizer):
        batches = list(
            classification_dataset(numbered_source(7), tokenizer, SPECIAL, 8, 3, training=False)
        )
        assert [ids.shape.as_list() for ids, _ in batches] == [[3, 8], [3, 8], [1, 8]]
        assert np.concatenate([labels for _, labels in batches]).tolist() == list(range(7))

    @pytest.mark.parametrize("training", [True, False])
    def test_the_graph_knows_the_shapes_of_training(self, tokenizer, training):
        dataset = classification_dataset(
            numbered_source(7), tokenizer, SPECIAL, 8, 3, training=training
        )
        ids, labels = dataset.element_spec
        batch = 3 if training else None
        assert ids == tf.TensorSpec([batch, 8], tf.int32)
        assert labels == tf.TensorSpec([batch], tf.int32)

    def test_training_from_a_step_is_the_rest_of_the_whole_stream(self, tokenizer):
        def batches(start_step, count):
            dataset = classification_dataset(
                numbered_source(7),
                tokenizer,
                SPECIAL,
                8,
                batch_size=3,
                training=True,
                seed=1,
                start_step=start_step,
                pad_to_batch=True,
                block_size=4,
            )
            return [
                (ids.numpy().tolist(), labels.numpy().tolist())
                for ids, labels in dataset.take(count)
            ]

        whole = batches(0, 13)
        assert all(len(labels) == 3 for _, labels in whole)
        for start_step in (3, 9):  # in the middle of the second and fourth epoch
            assert batches(start_step, 4) == whole[start_step : start_step + 4]

    def test_split_smaller_than_a_batch_still_fills_it(self, tokenizer):
        dataset = classification_dataset(
            numbered_source(2), tokenizer, SPECIAL, 8, 5, training=True
        )
        _, labels = next(iter(dataset))
        assert sorted(labels.numpy().tolist()) in ([0, 0, 0, 1, 1], [0, 0, 1, 1, 1])

    @pytest.mark.parametrize("arguments", [{"batch_size": 0}, {"batch_size": 2, "start_step": -1}])
    def test_refuses_sizes_below_their_range(self, tokenizer, arguments):
        with pytest.raises(ValueError, match="Expected batch_size >= 1 and start_step >= 0"):
            classification_dataset(
                numbered_source(2), tokenizer, SPECIAL, 8, training=True, **arguments
            )

    def test_files_stream_through_several_epochs(self, tokenizer, tmp_path):
        path = tmp_path / "train.jsonl"
        path.write_text("".join(json.dumps({"text": "token", "label": i}) + "\n" for i in range(5)))
        source = open_source(str(path), "train", FIELDS, num_labels=5)
        dataset = classification_dataset(source, tokenizer, SPECIAL, 8, 5, training=True)
        for _, labels in dataset.take(3):
            assert sorted(labels.numpy().tolist()) == list(range(5))
