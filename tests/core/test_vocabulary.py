"""Claims about vocabularies: where they are found, and what their tokenizer withstands."""

import pytest
import tensorflow as tf

from bigbird.core.vocabulary import SpecialTokens, Tokenizer, find_vocabulary, vocabulary_size


def test_path_is_taken_as_it_is(vocabulary_file):
    assert find_vocabulary(vocabulary_file) == vocabulary_file


def test_vocab_dir_is_searched_before_the_user_cache(tmp_path, monkeypatch):
    own, cache = tmp_path / "own", tmp_path / "cache" / "bigbird" / "vocab"
    monkeypatch.setenv("BIGBIRD_VOCAB_DIR", str(own))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for folder in (cache, own):
        folder.mkdir(parents=True)
        (folder / "gpt2.model").write_bytes(b"model")
        assert find_vocabulary("gpt2") == str(folder / "gpt2.model")


def test_missing_named_vocabulary_says_where_to_get_it_and_where_to_put_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("BIGBIRD_VOCAB_DIR", str(tmp_path / "own"))
    with pytest.raises(ValueError, match="pegasus.model") as caught:
        find_vocabulary("pegasus")
    for part in (
        "google-research/bigbird",
        str(tmp_path / "own" / "pegasus.model"),
        str(tmp_path / "bigbird" / "vocab" / "pegasus.model"),
        "BIGBIRD_VOCAB_DIR",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["/no/such.model", "gpt3", "", "."])
def test_missing_path_is_named(name):
    with pytest.raises(ValueError, match="--vocab_model_file="):
        find_vocabulary(name)


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x0a\xff\xff\xff\xff"])
def test_file_that_is_no_model_is_named(tmp_path, content):
    path = tmp_path / "broken.model"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="broken.model is not a SentencePiece model"):
        Tokenizer(str(path))


def test_special_id_outside_the_vocabulary_names_id_and_flag(vocabulary_file):
    size = vocabulary_size(vocabulary_file)
    SpecialTokens().check(size, "pad", "eos", "bos", "cls", "sep", "mask")
    with pytest.raises(ValueError, match=rf"mask={size}.*--mask_id"):
        SpecialTokens(mask=size).check(size, "cls", "mask")
    with pytest.raises(ValueError, match="pad=-1"):
        SpecialTokens(pad=-1).check(size, "pad")


def test_text_survives_the_round_trip(vocabulary_file):
    tokenizer = Tokenizer(vocabulary_file)
    text = tf.constant(["sparse attention", "", "block window"])
    ids = tokenizer.tokenize(text)
    assert ids.dtype == tf.int32
    assert int(tf.reduce_max(ids)) < tokenizer.vocab_size == vocabulary_size(vocabulary_file)
    assert tokenizer.detokenize(ids).numpy().tolist() == text.numpy().tolist()


@pytest.mark.parametrize(
    "text",
    [b"", b"\0", b"a\0b", b"\xff\xfe\xc3", b"a\r\nb\r", "\u0085\u2028日本\U0001f600".encode()],
)
def test_any_bytes_are_tokenized(vocabulary_file, text):
    ids = Tokenizer(vocabulary_file).tokenize([text])
    assert ids.shape[0] == 1


def test_tokenizer_works_after_the_seed_is_reset(vocabulary_file):
    tokenizer = Tokenizer(vocabulary_file)
    in_graph = tf.function(lambda text: tokenizer.tokenize(text).values)
    before = in_graph(tf.constant(["sparse attention"]))
    tf.random.set_seed(1)  # empties the kernel cache, where eagerly made models live
    after = in_graph(tf.constant(["sparse attention"]))
    again = tokenizer.tokenize(["sparse attention"]).values
    assert before.numpy().tolist() == after.numpy().tolist() == again.numpy().tolist()
