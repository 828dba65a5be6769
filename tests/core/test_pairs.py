"""Claims about pairs of document and summary: ids and back, batches, and what is counted."""

import io

import numpy as np
import pytest
import sentencepiece
import tensorflow as tf
from absl import logging

from bigbird.core.data import ExampleSource, open_source
from bigbird.core.pairs import (
    PairEncoder,
    pair_dataset,
    survey_pairs,
    warn_of_empty_documents,
)
from bigbird.core.vocabulary import SpecialTokens, Tokenizer

FIELDS = ("document", "summary")
TEXT = "attention block sparse dense"


@pytest.fixture(scope="module")
def tokenizer(vocabulary_file):
    return Tokenizer(vocabulary_file)


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return PairEncoder(tokenizer, SpecialTokens(), 12, 6, substitute_newline="<n>", block_size=4)


def source_of(documents, summaries):
    records = {"document": tf.constant(documents), "summary": tf.constant(summaries)}
    dataset = tf.data.Dataset.from_tensor_slices(records)
    return ExampleSource(dataset, len(documents), None, "the test's pairs")


def test_a_document_is_its_pieces_cut_and_padded(encoder, tokenizer):
    pieces = tokenizer.tokenize([TEXT])[0].numpy()
    ids = encoder.documents(tf.constant([TEXT, TEXT * 20, ""])).numpy()
    assert ids.shape == (3, 12) and ids.dtype == np.int32
    np.testing.assert_array_equal(ids[0], [*pieces, *[0] * (12 - len(pieces))])
    assert (ids[1] > 0).all() and not ids[2].any()


def test_padded_to_the_longest_a_batch_has_whole_blocks_and_at_least_one(encoder):
    assert encoder.documents(tf.constant([TEXT, ""]), pad_to_longest=True).shape[1] % 4 == 0
    assert encoder.documents(tf.constant(["", ""]), pad_to_longest=True).shape == [2, 4]


def test_a_summary_ends_with_eos_unless_it_is_cut(encoder):
    ids = encoder.summaries(tf.constant(["token", TEXT * 3, ""])).numpy()
    assert ids.shape == (3, 6)
    assert (ids[0] == 1).sum() == 1 and ids[0][ids[0] != 0][-1] == 1
    assert (ids[1] > 1).all()
    assert ids[2].tolist() == [1, 0, 0, 0, 0, 0]


def test_ids_of_a_summary_give_its_text_back(tokenizer):
    # The test's vocabulary can spell this mark.
    encoder = PairEncoder(tokenizer, SpecialTokens(), 64, 64, "window")
    texts = ["block sparse\ndense matrix", "", "token"]
    restored = encoder.texts(encoder.summaries(tf.constant(texts))).numpy()
    assert [text.decode() for text in restored] == texts


def test_nothing_behind_the_first_eos_or_padding_is_read(encoder, tokenizer):
    token, window = (int(tokenizer.tokenize([word])[0][-1]) for word in ("token", "window"))
    rows = tf.constant([[token, 1, window, window], [token, 0, window, 1], [1, token, 1, 0]])
    texts = encoder.texts(rows).numpy().tolist()
    assert texts[0] == texts[1] != b""
    assert texts[2] == b""


@pytest.mark.parametrize(
    ("substitute", "text", "restored"),
    [
        ("<n>", "one <n> two<n>three", "one\ntwo\nthree"),
        (" <n> ", "one<n>two", "one\ntwo"),
        ("$n.", "one $n. two $nx", "one\ntwo $nx"),
        (" ", "one two", "one two"),
        ("", "one two", "one two"),
        (None, "one\ntwo", "one\ntwo"),
    ],
)
def test_newlines_are_restored_where_they_can_be_told(tokenizer, substitute, text, restored):
    encoder = PairEncoder(tokenizer, SpecialTokens(), 8, 8, substitute)
    assert encoder.restore_newlines(tf.constant([text])).numpy() == [restored.encode()]


def test_the_blank_before_a_mark_is_taken_away(encoder):
    marked, plain = "attention <n> block [a] < b [ c ]", "attention<n> block[a] < b [ c ]"
    np.testing.assert_array_equal(
        encoder.documents(tf.constant([marked])), encoder.documents(tf.constant([plain]))
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"max_encoder_length": 0}, "--max_encoder_length"),
        ({"max_decoder_length": 1}, "--max_decoder_length"),
        ({"special": SpecialTokens(bos=5000)}, "--bos_id"),
        ({"special": SpecialTokens(eos=3)}, "set --eos_id=1"),
    ],
)
def test_lengths_and_special_ids_that_cannot_be_are_told(tokenizer, changes, told):
    settings = {
        "tokenizer": tokenizer,
        "special": SpecialTokens(),
        "max_encoder_length": 8,
        "max_decoder_length": 8,
    }
    with pytest.raises(ValueError, match=told):
        PairEncoder(**{**settings, **changes})


def test_a_vocabulary_without_eos_is_told(tmp_path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT] * 20),
        model_writer=model,
        vocab_size=25,
        hard_vocab_limit=False,
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=-1,
        minloglevel=2,
    )
    path = tmp_path / "endless.model"
    path.write_bytes(model.getvalue())
    with pytest.raises(ValueError, match="endless.model declares no end-of-sequence piece"):
        PairEncoder(Tokenizer(str(path)), SpecialTokens(), 8, 8)


def test_training_batches_resume_exactly(encoder):
    texts = [f"token {'window ' * (i % 4)}" for i in range(7)]
    source = source_of(texts, [text.split()[-1] for text in texts])

    def batches(start_step, count):
        dataset = pair_dataset(source, encoder, 3, training=True, seed=1, start_step=start_step)
        return [
            (documents.numpy().tolist(), summaries.numpy().tolist())
            for documents, summaries in dataset.take(count)
        ]

    whole = batches(0, 6)
    assert batches(4, 2) == whole[4:]
    assert all(len(documents) == len(summaries) == 3 for documents, summaries in whole)


def test_evaluation_gives_every_pair_once_in_order(encoder):
    source = source_of(["token", "window", "layer"], ["token", "", "layer"])
    found = list(pair_dataset(source, encoder, 2, training=False, pad_to_batch=True))
    assert [len(documents) for documents, _ in found] == [2, 1]
    documents = tf.concat([ids for ids, _ in found], axis=0)
    np.testing.assert_array_equal(
        documents, encoder.documents(tf.constant(["token", "window", "layer"]), True)
    )


@pytest.mark.parametrize(
    "names", [("document", "summary"), ("article", "abstract"), ("text", "summary")]
)
@pytest.mark.parametrize("kind", ["tfrecord", "jsonl", "csv"])
def test_pairs_are_read_under_every_name_and_from_every_kind(tmp_path, request, kind, names):
    path = tmp_path / f"train.{kind}"
    write = request.getfixturevalue(f"write_{kind}")
    write(path, [dict(zip(names, ("long", "short"), strict=True))] * 2)
    source = open_source(str(path), "train", FIELDS)
    assert source.num_examples == 2
    assert next(source.dataset.as_numpy_iterator()) == {"document": b"long", "summary": b"short"}


def test_what_is_cut_or_empty_is_counted_and_said(encoder, caplog):
    logging.use_absl_handler()
    source = source_of(["token", " \n", TEXT, ""], ["", TEXT * 2, "token", TEXT * 3])
    with caplog.at_level("WARNING"):
        survey = survey_pairs(source, encoder)
    assert (survey.examples, survey.cut) == (4, 2)
    assert (survey.empty_documents, survey.empty_summaries) == (2, 1)
    assert "2 of 4 summaries are longer than --max_decoder_length=6" in caplog.text
    assert "2 of 4 documents are empty" in caplog.text
    assert "1 of 4 summaries are empty" in caplog.text


def test_empty_documents_without_summaries_are_counted_too(tmp_path, write_jsonl, caplog):
    logging.use_absl_handler()
    path = tmp_path / "documents.jsonl"
    write_jsonl(path, [{"document": text} for text in ("token", "", " \t")])
    with caplog.at_level("WARNING"):
        warn_of_empty_documents(open_source(str(path), None, ("document",)))
    assert "2 of 3 documents are empty" in caplog.text


def test_nothing_is_said_where_nothing_is_amiss(tokenizer, caplog):
    logging.use_absl_handler()
    encoder = PairEncoder(tokenizer, SpecialTokens(), 8, 64)
    with caplog.at_level("WARNING"):
        survey_pairs(source_of([TEXT], ["token"]), encoder)
    assert caplog.text == ""


def test_entropy_is_that_of_the_target_tokens(tokenizer):
    encoder = PairEncoder(tokenizer, SpecialTokens(), 8, 40)
    summaries = ["token", "token window", TEXT]
    survey = survey_pairs(source_of([""] * 3, summaries), encoder)
    ids = encoder.summaries(tf.constant(summaries)).numpy()
    _, counts = np.unique(ids[ids != 0], return_counts=True)
    frequencies = counts / counts.sum()
    assert survey.tokens == counts.sum()
    np.testing.assert_allclose(
        survey.unigram_entropy, -(frequencies * np.log(frequencies)).sum(), rtol=1e-12
    )
