"""Claims about the sequences a teacher reads: the same ones in the same order, every time."""

import numpy as np
import pytest

from bigbird.core.data import open_source
from bigbird.core.pairs import PairEncoder
from bigbird.core.vocabulary import SpecialTokens, Tokenizer
from bigbird.distillation import sequences
from bigbird.pretrain.masking import WordMasker

SPECIAL = SpecialTokens()
TEXTS = ["attention block sparse " * 30, "dense matrix", ""]


@pytest.fixture(scope="module")
def tokenizer(vocabulary_file):
    return Tokenizer(vocabulary_file)


@pytest.fixture
def source(tmp_path, write_jsonl):
    write_jsonl(tmp_path / "train.jsonl", [{"text": text} for text in TEXTS])
    return open_source(str(tmp_path), "train", ("text",))


def pieces(tokenizer, text):
    return tokenizer.tokenize([text])[0].numpy().tolist()


def test_documents_are_cut_or_split_into_windows(source, tokenizer):
    def windows(**options):
        dataset = sequences.document_windows(source, tokenizer, SPECIAL, 20, **options)
        return [ids.tolist() for ids in dataset.as_numpy_iterator()]

    cut, split = windows(), windows(split_documents=True)
    assert [len(ids) for ids in cut] == [20, len(pieces(tokenizer, TEXTS[1])) + 2, 2]
    assert all(ids[0] == SPECIAL.cls and ids[-1] == SPECIAL.sep for ids in split)
    whole = sum((ids[1:-1] for ids in split), [])
    assert whole == sum((pieces(tokenizer, text) for text in TEXTS), [])
    assert cut[0] == split[0] and cut[1:] == split[-2:]


def test_words_are_hidden_by_seed_place_and_copy(source, tokenizer):
    masker = WordMasker(tokenizer, SPECIAL, 40, 10, 0.15)

    def hidden(seed, copies=1):
        dataset = sequences.masked_sequences(source, masker, copies=copies, seed=seed)
        return list(dataset.as_numpy_iterator())

    for sequence in hidden(0):
        ids, mask, labels = (sequence[name] for name in ("input_ids", "mask", "labels"))
        assert len(ids) == len(mask) == len(labels) and SPECIAL.pad not in ids
        assert ids[0] == SPECIAL.cls and ids[-1] == SPECIAL.sep
        assert (labels[mask] > 0).all() and (labels[~mask] == -1).all()
    first, again = hidden(0)[0], hidden(0)[0]
    np.testing.assert_array_equal(first["input_ids"], again["input_ids"])
    shown = np.where(first["mask"], first["labels"], first["input_ids"])[1:-1].tolist()
    text = pieces(tokenizer, TEXTS[0])
    # The window is a part of the text.
    assert any(text[i : i + len(shown)] == shown for i in range(len(text)))
    assert not np.array_equal(first["labels"], hidden(1)[0]["labels"])
    copies = hidden(0, copies=2)
    assert len(copies) == 2 * len(TEXTS)
    assert not np.array_equal(copies[0]["labels"], copies[1]["labels"])


def test_the_last_token_of_a_text_predicts_nothing(source, tokenizer):
    windows = sequences.document_windows(source, tokenizer, SPECIAL, 20)
    first = next(sequences.next_token_sequences(windows).as_numpy_iterator())
    assert first["mask"].tolist() == [True] * 19 + [False]


def test_packs_hold_whole_sequences_in_order_and_say_which(source, tokenizer):
    windows = sequences.document_windows(source, tokenizer, SPECIAL, 20, split_documents=True)
    singles = list(sequences.next_token_sequences(windows).as_numpy_iterator())
    packed = sequences.packed_sequences(sequences.next_token_sequences(windows), 45)
    packs = list(packed.as_numpy_iterator())
    assert max(len(pack["input_ids"]) for pack in packs) <= 45 and len(packs) < len(singles)
    parts = [
        {name: pack[name][pack["document_ids"] == n] for name in ("input_ids", "mask")}
        for pack in packs
        for n in range(1, pack["document_ids"].max() + 1)
    ]
    for part, single in zip(parts, singles, strict=True):
        np.testing.assert_array_equal(part["input_ids"], single["input_ids"])
        # The last token of a document does not predict the first of the next.
        np.testing.assert_array_equal(part["mask"], single["mask"])


def test_pairs_have_no_padding_and_all_words_of_the_summary_take_part(
    tmp_path, write_jsonl, tokenizer
):
    write_jsonl(tmp_path / "train.jsonl", [{"document": TEXTS[0], "summary": TEXTS[1]}])
    pairs = open_source(str(tmp_path), "train", ("document", "summary"))
    encoder = PairEncoder(tokenizer, SPECIAL, 16, 12)
    (pair,) = sequences.pair_sequences(pairs, encoder).as_numpy_iterator()
    np.testing.assert_array_equal(pair["input_ids"], pieces(tokenizer, TEXTS[0])[:16])
    np.testing.assert_array_equal(pair["target_ids"], [*pieces(tokenizer, TEXTS[1]), SPECIAL.eos])
    assert pair["mask"].all()


def test_settings_that_cannot_be_are_refused(source, tokenizer):
    with pytest.raises(ValueError, match="max_length=2"):
        sequences.document_windows(source, tokenizer, SPECIAL, 2)
    with pytest.raises(ValueError, match="copies=0"):
        sequences.masked_sequences(source, WordMasker(tokenizer, SPECIAL, 9, 2, 0.1), copies=0)
