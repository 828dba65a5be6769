"""The search finds what a plain Python search on explicit prefixes finds, and keeps its rules."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from bigbird.core import beam_search
from bigbird.core.beam_search import DecodingOptions, SpecialIds, decode

VOCAB = 6
SPECIAL = SpecialIds(vocab_size=VOCAB, start=2, eos=1, pad=0)


class RiggedModel:
    """Logits that depend on every token of a prefix and its place, remembered in the cache."""

    def __init__(self, batch_size=2, vocab_size=VOCAB, seed=0, scale=2.0):
        rng = np.random.default_rng(seed)
        self.batch_size = batch_size
        self.by_token = scale * rng.standard_normal([batch_size, vocab_size, vocab_size])
        self.by_place = scale * rng.standard_normal([64, vocab_size, vocab_size])
        self.steps = 0

    def logits(self, document, prefix):
        """float64 `[V]` after a prefix, which begins with the start token."""
        places = sum(self.by_place[i, token] for i, token in enumerate(prefix))
        return self.by_token[document, prefix[-1]] + places

    def step(self, tokens, position, cache, visible):
        self.steps += 1
        tokens = tf.convert_to_tensor(tokens)
        by_place = tf.gather(tf.constant(self.by_place, tf.float32)[position], tokens)
        written = tf.range(cache.shape[2]) == position
        # [B, 1, C, K, V]: an axis of one head.
        cache = tf.where(
            written[:, tf.newaxis, tf.newaxis], by_place[:, tf.newaxis, tf.newaxis], cache
        )
        past = tf.einsum("BKCS,BCSV->BKV", self._for_all(visible, tokens), cache[:, 0])
        by_token = tf.gather(tf.constant(self.by_token, tf.float32), tokens, batch_dims=1)
        return by_token + past, cache

    def _for_all(self, visible, tokens):
        shape = [*tokens.shape, *visible.shape[2:]]
        return tf.cast(tf.broadcast_to(visible, shape), tf.float32)

    def decode(self, special=SPECIAL, **options):
        options = DecodingOptions(**options)
        cache = tf.zeros([self.batch_size, 1, 0, options.beam_size, special.vocab_size])
        return decode(self.step, cache, self.batch_size, options, special)


def _log_softmax(logits):
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


def _penalty(length, options):
    return ((options.beam_start + length) / (1 + options.beam_start)) ** options.alpha


def _search_prefixes(model, document, options, special=SPECIAL):
    """The 2021 beam search on lists of tokens: `(tokens, score)` of the best text."""
    live, finished = [(0.0, (special.start,))], []
    for length in range(1, options.max_length + 1):
        grown = [
            (total + log_prob, (*prefix, token))
            for total, prefix in live
            for token, log_prob in enumerate(_log_softmax(model.logits(document, prefix)))
            if not (token == special.eos and length <= options.min_length)
        ]
        grown = sorted(grown, key=lambda item: -item[0])[: 2 * options.beam_size]
        live = [item for item in grown if item[1][-1] != special.eos][: options.beam_size]
        finished += [
            (total / _penalty(length, options), prefix)
            for total, prefix in grown
            if prefix[-1] == special.eos
        ]
        finished = sorted(finished, key=lambda item: -item[0])[: options.beam_size]
    score, best = (
        finished[0]
        if finished
        else (
            live[0][0] / _penalty(options.max_length, options),
            live[0][1],
        )
    )
    return best[1:], score


def _texts(decoded, special=SPECIAL):
    """The decoded ids, each cut behind its end-of-text token."""
    texts = []
    for row in decoded.ids.numpy().tolist():
        end = row.index(special.eos) + 1 if special.eos in row else len(row)
        assert all(token == special.pad for token in row[end:])
        texts.append(tuple(row[:end]))
    return texts


@pytest.fixture(autouse=True)
def _small_capacity(monkeypatch):
    """The cache grows twice in a text of seven tokens."""
    monkeypatch.setattr(beam_search, "FIRST_CAPACITY", 2)


@pytest.mark.parametrize("alpha", [0.0, 0.8])
@pytest.mark.parametrize("min_length", [0, 4])
@pytest.mark.parametrize("beam_size", [2, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_beams_equal_a_search_on_explicit_prefixes(seed, beam_size, min_length, alpha):
    model = RiggedModel(seed=seed)
    options = {
        "beam_size": beam_size,
        "alpha": alpha,
        "min_length": min_length,
        "max_length": 7,
        "early_stopping": False,
    }
    decoded = model.decode(**options)
    for document, text in enumerate(_texts(decoded)):
        best, score = _search_prefixes(model, document, DecodingOptions(**options))
        assert text == best
        np.testing.assert_allclose(decoded.scores[document], score, rtol=1e-5)


def test_as_many_beams_as_tokens_find_the_best_of_all_texts_of_two():
    model = RiggedModel()
    decoded = model.decode(beam_size=VOCAB, max_length=2, alpha=0.8, early_stopping=False)
    options = DecodingOptions(beam_size=VOCAB, max_length=2)
    for document, text in enumerate(_texts(decoded)):
        scores = {}
        for tokens in itertools.product(range(VOCAB), repeat=2):
            tokens = tokens[:1] if tokens[0] == SPECIAL.eos else tokens
            prefixes = [(SPECIAL.start, *tokens[:i]) for i in range(len(tokens))]
            total = sum(
                _log_softmax(model.logits(document, prefix))[token]
                for prefix, token in zip(prefixes, tokens, strict=True)
            )
            if tokens[-1] == SPECIAL.eos:
                scores[tokens] = total / _penalty(len(tokens), options)
        assert text == max(scores, key=scores.get)


def test_greedy_takes_the_likeliest_token_until_the_end():
    model = RiggedModel(batch_size=4, seed=3)
    decoded = model.decode(max_length=7, alpha=0.8)
    ended = 0
    for document, text in enumerate(_texts(decoded)):
        prefix, total = [SPECIAL.start], 0.0
        while len(prefix) <= 7 and prefix[-1] != SPECIAL.eos:
            log_probs = _log_softmax(model.logits(document, prefix))
            prefix.append(int(log_probs.argmax()))
            total += log_probs.max()
        assert text == tuple(prefix[1:])
        ended += prefix[-1] == SPECIAL.eos
        score = total / _penalty(len(text), DecodingOptions())
        np.testing.assert_allclose(decoded.scores[document], score, rtol=1e-5)
    assert 0 < ended < 4


def test_equal_scores_go_to_the_lower_index():
    model = RiggedModel(scale=0.0)
    assert _texts(model.decode(max_length=2)) == [(0, 0)] * 2
    ids, _ = beam_search.beam_search(
        model.step,
        tf.zeros([2, 1, 0, 3, VOCAB]),
        2,
        DecodingOptions(beam_size=3, max_length=1, min_length=1),
        SPECIAL,
    )
    assert ids.numpy().tolist() == [[[0], [2], [3]]] * 2


@pytest.mark.parametrize("early_stopping", [True, False])
@pytest.mark.parametrize("beam_size", [1, 3])
def test_the_search_stops_when_every_text_has_ended(beam_size, early_stopping):
    model = RiggedModel()
    model.by_token[..., SPECIAL.eos] += 50.0
    texts = _texts(
        model.decode(
            beam_size=beam_size, min_length=2, max_length=50, early_stopping=early_stopping
        )
    )
    assert all(len(text) == 3 for text in texts)
    # The other beams end one step later, being forced to something else when the first ends. What
    # could still become the best at full length is followed for longer, but not to the end.
    may_be_overtaken = beam_size > 1 and not early_stopping
    assert model.steps < 50 if may_be_overtaken else model.steps <= 3 + (beam_size > 1)


@pytest.mark.parametrize("early_stopping", [True, False])
def test_a_text_does_not_depend_on_the_rest_of_the_batch(early_stopping):
    together = RiggedModel(batch_size=6, seed=5)
    options = {"beam_size": 3, "max_length": 7, "early_stopping": early_stopping}
    decoded = together.decode(**options)
    for document in range(6):
        alone = RiggedModel(batch_size=6, seed=5)
        alone.by_token, alone.batch_size = alone.by_token[document : document + 1], 1
        single = alone.decode(**options)
        np.testing.assert_array_equal(single.ids[0], decoded.ids[document])
        np.testing.assert_allclose(single.scores[0], decoded.scores[document], rtol=1e-6)


# ------------------------------------------------------------------------------ what steers


# A text that ends is preferred to one that does not, however unlikely; these have no end.
ENDLESS = SPECIAL._replace(eos=None)


def _looping_model(batch_size=2):
    """Likes to say 3, 4, 5, 3, 4, 5, …"""
    model = RiggedModel(batch_size, scale=0.1)
    for token, follower in ((2, 3), (3, 4), (4, 5), (5, 3)):
        model.by_token[:, token, follower] += 5.0
    return model


def _repeats(text, size):
    grams = list(zip(*(text[i:] for i in range(size)), strict=False))
    return len(grams) - len(set(grams))


@pytest.mark.parametrize("beam_size", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_ngram_occurs_twice(beam_size, size):
    max_length = 5 if size == 1 else 20
    plain = _texts(
        _looping_model().decode(ENDLESS, beam_size=beam_size, max_length=max_length), ENDLESS
    )
    assert all(_repeats(text, size) for text in plain)
    texts = _texts(
        _looping_model().decode(
            ENDLESS, beam_size=beam_size, max_length=max_length, no_repeat_ngram_size=size
        ),
        ENDLESS,
    )
    assert not any(_repeats(text, size) for text in texts)


def test_an_ngram_longer_than_the_text_forbids_nothing():
    plain = _looping_model().decode(ENDLESS, max_length=6)
    np.testing.assert_array_equal(
        _looping_model().decode(ENDLESS, max_length=6, no_repeat_ngram_size=7).ids, plain.ids
    )


def test_forbidden_tokens_do_not_change_the_score_of_a_text():
    model = _looping_model(batch_size=1)
    decoded = model.decode(ENDLESS, max_length=5, no_repeat_ngram_size=2, alpha=0.0)
    (text,) = _texts(decoded, ENDLESS)
    prefixes = [(SPECIAL.start, *text[:i]) for i in range(len(text))]
    total = sum(
        _log_softmax(model.logits(0, prefix))[token]
        for prefix, token in zip(prefixes, text, strict=True)
    )
    np.testing.assert_allclose(decoded.scores[0], total, rtol=1e-5)


def test_the_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    logits = tf.constant([[2.0, -2.0, 4.0, 1.0, -1.0, 0.5]])
    ids = tf.constant([[3, 1, 3, 0]])
    options = DecodingOptions(max_length=4, repetition_penalty=2.0)
    penalized, allowed = beam_search._steer(logits, ids, tf.constant(3), options, SPECIAL)
    # The last id is not written yet.
    np.testing.assert_allclose(penalized, [[2.0, -4.0, 4.0, 0.5, -1.0, 0.5]])
    np.testing.assert_array_equal(allowed, penalized)


def test_a_penalty_breaks_a_loop():
    text, _ = _texts(
        _looping_model().decode(ENDLESS, max_length=6, repetition_penalty=100.0), ENDLESS
    )
    assert len(set(text)) > 3


@pytest.mark.parametrize("beam_size", [1, 3])
def test_forced_tokens_come_first_and_overrule_what_is_forbidden(beam_size):
    options = {"beam_size": beam_size, "max_length": 6, "no_repeat_ngram_size": 1}
    forced = _looping_model().decode(ENDLESS, forced_first_ids=[5, 5, 0], **options)
    for text in _texts(forced, ENDLESS):
        assert text[:3] == (5, 5, 0)
        assert len(set(text[3:]) | {5, 0}) == 5


@pytest.mark.parametrize("beam_size", [1, 3])
def test_a_text_has_its_minimum_and_maximum_length(beam_size):
    model = RiggedModel()
    model.by_token[..., SPECIAL.eos] += 50.0
    lengths = [len(t) for t in _texts(model.decode(beam_size=beam_size, min_length=4))]
    # The end-of-text token counts for the maximum, not for the minimum.
    assert lengths == [5, 5]
    texts = _texts(_looping_model().decode(ENDLESS, beam_size=beam_size, max_length=3), ENDLESS)
    assert [len(text) for text in texts] == [3, 3]


@pytest.mark.parametrize("beam_size", [1, 3])
def test_a_vocabulary_without_an_end_decodes_to_the_maximum(beam_size):
    special = SPECIAL._replace(eos=None)
    decoded = RiggedModel().decode(special, beam_size=beam_size, max_length=5, min_length=2)
    assert decoded.ids.shape == [2, 5]
    assert np.isfinite(decoded.scores).all()


# ------------------------------------------------------------------------------ sampling


def test_samples_are_decided_by_the_seed():
    def draw(seed):
        return RiggedModel().decode(sample=True, seed=seed, max_length=20).ids.numpy()

    np.testing.assert_array_equal(draw(1), draw(1))
    assert (draw(1) != draw(2)).any()


def test_samples_follow_the_softmax():
    model = RiggedModel(batch_size=1)
    model.by_token = np.repeat(model.by_token, 4000, axis=0)
    model.batch_size = 4000
    ids = model.decode(sample=True, max_length=1, temperature=1.5).ids.numpy()[:, 0]
    expected = np.exp(_log_softmax(model.logits(0, [SPECIAL.start]) / 1.5))
    frequencies = np.bincount(ids, minlength=VOCAB) / 4000
    # Four standard deviations of a frequency.
    np.testing.assert_allclose(frequencies, expected, atol=4 * 0.5 / 4000**0.5)


def test_top_k_and_top_p_keep_the_likeliest_tokens():
    logits = tf.tile(tf.math.log([[0.1, 0.4, 0.05, 0.3, 0.15]]), [500, 1])

    def drawn(**changes):
        options = DecodingOptions(sample=True, **changes)
        return set(beam_search._draw(logits, tf.constant(0), options).numpy())

    assert drawn(top_k=2) == {1, 3}
    assert drawn(top_p=0.6) == {1, 3}
    assert drawn(top_p=0.75) == {1, 3, 4}
    assert drawn(top_k=3, top_p=0.1) == {1}
    assert drawn() == {0, 1, 2, 3, 4}


def test_one_candidate_or_a_low_temperature_is_greedy():
    greedy = RiggedModel().decode(max_length=7)
    for changes in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}):
        sampled = RiggedModel().decode(max_length=7, sample=True, **changes)
        np.testing.assert_array_equal(sampled.ids, greedy.ids)
        np.testing.assert_allclose(sampled.scores, greedy.scores, rtol=1e-5)


# ------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beam_size": 0}, "beam_size=0"),
        ({"min_length": 9, "max_length": 8}, "min_length=9 is above max_length=8"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"alpha": -0.1}, "alpha=-0.1"),
        ({"repetition_penalty": 0.9}, "repetition_penalty=0.9"),
        ({"sample": True, "beam_size": 2}, "sample=True with beam_size=2"),
        ({"forced_first_ids": [3, 3], "max_length": 1}, "forced_first_ids has 2"),
        ({"beam_size": 7}, "beam_size=7 is above the 6 tokens"),
        ({"top_k": 7}, "top_k=7 is above the 6 tokens"),
        ({"forced_first_ids": [3, 6]}, r"forced_first_ids\[1\]=6 is not in the vocabulary"),
    ],
)
def test_options_that_cannot_be_met_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        RiggedModel().decode(**changes)


def test_special_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match="eos_id=9 is not in the vocabulary"):
        RiggedModel().decode(SPECIAL._replace(eos=9))
