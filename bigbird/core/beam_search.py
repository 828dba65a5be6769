"""Search for a good text, token by token: greedy, sampling and beam search, and what steers them.

Axis letters: B batch (documents), K beams, T tokens at most, C capacity of the cache in positions,
V vocabulary, N candidates.

    score(text) = Σ log p(token | tokens before) / ((beam_start + length) / (1 + beam_start))^alpha

The search knows no model. It calls `step`, which maps the newest token of every beam to logits, and
it never moves what a model remembers: the cache has a slot for every position and beam, and a
small table tells in which slots the past of each beam lies.

Source: Wu et al., arXiv:1609.08144, section 7 (length normalisation); Holtzman et al.,
arXiv:1904.09751 (top-p); Fan et al., arXiv:1805.04833 (top-k); Keskar et al., arXiv:1909.05858,
section 4.1 (repetition penalty); Paulus et al., arXiv:1705.04304, section 2.5 (no repeated n-gram).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

# The cache starts with room for so many positions and doubles when it is full, so that a step costs
# what the text so far costs, not what the longest text would cost.
FIRST_CAPACITY = 64

_NEVER = float("-inf")


@dataclasses.dataclass(frozen=True)
class DecodingOptions:
    """How texts are searched for.

    Attributes:
      beam_size: texts followed at once; 1 is greedy, or sampling.
      max_length: tokens at most, the end-of-text token counted.
      min_length: tokens at least, before the end-of-text token.
      alpha, beam_start: of the length normalisation; alpha 0 does not normalise.
      early_stopping: True ends the search for a document once it has `beam_size` finished texts and
        no live one, at its present length, scores better than the worst of them. False goes on
        until no live one could become the best at any length, as if every step were taken.
      sample: draws tokens instead of taking the likeliest; `beam_size` must be 1.
      temperature: divides the logits before a draw.
      top_k: draws from the k likeliest tokens; 0 from all.
      top_p: draws from the fewest likeliest tokens that have this probability together.
      seed: of the draws. A draw depends on it, the step and the place in the batch.
      no_repeat_ngram_size: n forbids that any n tokens in a row occur twice; 0 allows it.
      repetition_penalty: at least 1; divides positive logits, and multiplies negative ones, of
        tokens that the text has already.
      forced_first_ids: tokens that every text begins with.

    Raises:
      ValueError: for a value outside its range, naming the field, the value and the remedy.
    """

    beam_size: int = 1
    max_length: int = 128
    min_length: int = 0
    alpha: float = 0.8
    beam_start: float = 5.0
    early_stopping: bool = True
    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0
    forced_first_ids: tuple[int, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "forced_first_ids", tuple(self.forced_first_ids))
        for field, least in (
            ("beam_size", 1),
            ("max_length", 1),
            ("min_length", 0),
            ("alpha", 0),
            ("beam_start", 0),
            ("top_k", 0),
            ("no_repeat_ngram_size", 0),
            ("repetition_penalty", 1),
        ):
            if not getattr(self, field) >= least:
                raise ValueError(f"{field}={getattr(self, field)}: expected at least {least}.")
        if not self.temperature > 0:
            raise ValueError(
                f"temperature={self.temperature}: expected more than 0; sample=False takes the "
                "likeliest token."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: expected a probability in (0, 1].")
        if self.min_length > self.max_length:
            raise ValueError(
                f"min_length={self.min_length} is above max_length={self.max_length}: no text can "
                "meet both; lower --min_length or raise the maximum."
            )
        if self.sample and self.beam_size > 1:
            raise ValueError(
                f"sample=True with beam_size={self.beam_size}: draws are made for one text per "
                "document; set beam_size=1 or sample=False."
            )
        if len(self.forced_first_ids) > self.max_length:
            raise ValueError(
                f"forced_first_ids has {len(self.forced_first_ids)} tokens and max_length="
                f"{self.max_length}: force fewer tokens or raise the maximum."
            )

    def check(self, special: SpecialIds) -> None:
        """Checks the options, and the ids, against the vocabulary.

        Raises:
          ValueError: for more beams or candidates than tokens, or an id outside the vocabulary.
        """
        for field in ("beam_size", "top_k"):
            if getattr(self, field) > special.vocab_size:
                raise ValueError(
                    f"{field}={getattr(self, field)} is above the {special.vocab_size} tokens of "
                    f"the vocabulary: lower {field}."
                )
        ids = {"bos_id": special.start, "eos_id": special.eos, "pad_id": special.pad}
        ids.update((f"forced_first_ids[{i}]", id) for i, id in enumerate(self.forced_first_ids))
        for name, value in ids.items():
            if value is not None and not 0 <= value < special.vocab_size:
                raise ValueError(
                    f"{name}={value} is not in the vocabulary, whose ids are 0 to "
                    f"{special.vocab_size - 1}: set it to an id of that vocabulary."
                )


class SpecialIds(NamedTuple):
    """What a search has to know of a vocabulary; without `eos`, texts end at their maximum."""

    vocab_size: int
    start: int
    eos: int | None
    pad: int


class Decoded(NamedTuple):
    """Texts found: int32 ids `[B, T]`, padded behind the end-of-text token, and scores `[B]`."""

    ids: tf.Tensor
    scores: tf.Tensor


# `step(tokens, position, cache, visible)` writes the tokens [B, K] of one position, a scalar, into
# the cache, slot by slot, and returns (logits of the next tokens [B, K, V], cache). `visible`,
# boolean [B or 1, K or 1, C, K], tells which (position, slot) pairs are a beam's past and present.
Step = Callable[[tf.Tensor, tf.Tensor, Any, tf.Tensor], tuple[tf.Tensor, Any]]


def decode(step: Step, cache, batch_size, options: DecodingOptions, special: SpecialIds) -> Decoded:
    """Finds a text for every document of a batch.

    Args:
      step: described above this function.
      cache: nested tensors whose axis 2 is the position, of size 0 here; the search enlarges it.
      batch_size: B, an int or int32 scalar.

    Raises:
      ValueError: for options that the vocabulary cannot meet.
    """
    options.check(special)
    if options.beam_size == 1:
        return _follow_one(step, cache, batch_size, options, special)
    ids, scores = beam_search(step, cache, batch_size, options, special)
    return Decoded(ids[:, 0], scores[:, 0])


# ------------------------------------------------------------------------------ one text


class _One(NamedTuple):
    """State of the search that follows one text per document; `lengths` count its tokens."""

    position: tf.Tensor
    cache: Any
    ids: tf.Tensor
    tokens: tf.Tensor
    log_probs: tf.Tensor
    lengths: tf.Tensor
    done: tf.Tensor


def _follow_one(step, cache, batch_size, options, special):
    def next_position(state):
        visible = tf.range(_capacity(state.cache)) <= state.position
        logits, cache = step(
            state.tokens[:, tf.newaxis],
            state.position,
            state.cache,
            visible[tf.newaxis, tf.newaxis, :, tf.newaxis],
        )
        logits, allowed = _steer(logits[:, 0], state.ids, state.position, options, special)
        if options.sample:
            tokens = _draw(allowed, state.position, options)
        else:
            tokens = tf.argmax(allowed, axis=-1, output_type=tf.int32)
        log_probs = tf.gather(allowed, tokens, batch_dims=1) - tf.reduce_logsumexp(logits, axis=-1)
        tokens = tf.where(state.done, special.pad, tokens)
        return _One(
            position=state.position + 1,
            cache=cache,
            ids=_write(state.ids, tokens, state.position),
            tokens=tokens,
            log_probs=tf.where(state.done, state.log_probs, state.log_probs + log_probs),
            lengths=tf.where(state.done, state.lengths, state.position + 1),
            done=state.done | _is_eos(tokens, special),
        )

    state = _One(
        position=tf.constant(0),
        cache=cache,
        ids=tf.fill([batch_size, options.max_length], special.pad),
        tokens=tf.fill([batch_size], special.start),
        log_probs=tf.zeros([batch_size]),
        lengths=tf.zeros([batch_size], tf.int32),
        done=tf.fill([batch_size], False),
    )
    state = _loop(next_position, state, options.max_length)
    return Decoded(state.ids, _normalized(state.log_probs, state.lengths, options))


def _draw(logits, position, options):
    """Draws a token of every row, `[B]`, by the largest of the logits plus Gumbel noise."""
    logits /= options.temperature
    if not options.top_k and options.top_p == 1:
        return _gumbel_argmax(logits, position, options.seed)
    likeliest, tokens = tf.math.top_k(logits, options.top_k or logits.shape[-1])
    before = tf.cumsum(tf.nn.softmax(likeliest), axis=-1, exclusive=True)
    likeliest = tf.where(before < options.top_p, likeliest, _NEVER)
    drawn = _gumbel_argmax(likeliest, position, options.seed)
    return tf.gather(tokens, drawn, batch_dims=1)


def _gumbel_argmax(logits, position, seed):
    # Integers of a named generator: floats, and the default one, differ in compiled code.
    bits = tf.random.stateless_uniform(
        tf.shape(logits), tf.stack([seed, position]), None, None, tf.uint32, alg="philox"
    )
    uniform = (tf.cast(tf.bitwise.right_shift(bits, 8), tf.float32) + 0.5) * 2.0**-24
    return tf.argmax(logits - tf.math.log(-tf.math.log(uniform)), axis=-1, output_type=tf.int32)


# ------------------------------------------------------------------------------ beams


class _Beams(NamedTuple):
    """State of a beam search: the live beams, and the finished texts, best first.

    `slots` `[B, K, T]` tells in which slot of the cache each position of a live beam lies.
    """

    position: tf.Tensor
    cache: Any
    ids: tf.Tensor
    tokens: tf.Tensor
    log_probs: tf.Tensor
    slots: tf.Tensor
    finished_ids: tf.Tensor
    finished_scores: tf.Tensor
    done: tf.Tensor


def beam_search(step: Step, cache, batch_size, options: DecodingOptions, special: SpecialIds):
    """Follows the K likeliest texts of every document.

    Every step grows the 2K likeliest continuations of the live beams. Those that end compete, by
    score, for K places among the finished; the K likeliest others live on. Ties go to the lower
    index. A document without a finished text at `max_length` gets its live ones.

    Args: as of `decode`.

    Returns:
      `(ids [B, K, T], scores [B, K])`, best first; a place that no text has reached scores -inf.
    """
    beams, max_length = options.beam_size, options.max_length
    own_slot = tf.range(beams)[:, tf.newaxis]

    def next_position(state):
        written = tf.range(max_length) <= state.position
        capacity = _capacity(state.cache)
        visible = state.slots[:, :, :capacity, tf.newaxis] == tf.range(beams)
        visible &= written[:capacity, tf.newaxis]
        logits, cache = step(state.tokens, state.position, state.cache, visible)
        totals, parents, tokens = _candidates(state, logits, options, special)
        ids = _write(tf.gather(state.ids, parents, batch_dims=1), tokens, state.position)
        ends = _is_eos(tokens, special)

        log_probs, order = tf.math.top_k(tf.where(ends, _NEVER, totals), beams)
        parents, live_ids, tokens = (
            tf.gather(x, order, batch_dims=1) for x in (parents, ids, tokens)
        )
        slots = tf.where(written, tf.gather(state.slots, parents, batch_dims=1), own_slot)

        length = state.position + 1
        scores = tf.where(ends, _normalized(totals, length, options), _NEVER)
        scores = tf.where(state.done[:, tf.newaxis], _NEVER, scores)
        finished_scores, order = tf.math.top_k(
            tf.concat([state.finished_scores, scores], axis=1), beams
        )
        finished_ids = tf.concat([state.finished_ids, ids], axis=1)
        finished_ids = tf.gather(finished_ids, order, batch_dims=1)
        if options.early_stopping:
            done = finished_scores[:, -1] >= _normalized(log_probs[:, 0], length, options)
        else:
            done = finished_scores[:, 0] >= _normalized(log_probs[:, 0], max_length, options)
        return _Beams(
            position=length,
            cache=cache,
            ids=live_ids,
            tokens=tokens,
            log_probs=log_probs,
            slots=slots,
            finished_ids=finished_ids,
            finished_scores=finished_scores,
            done=state.done | done,
        )

    nothing = tf.fill([batch_size, beams, max_length], special.pad)
    state = _Beams(
        position=tf.constant(0),
        cache=cache,
        ids=nothing,
        tokens=tf.fill([batch_size, beams], special.start),
        # All beams are alike at first: one of them lives.
        log_probs=tf.tile([[0.0] + [_NEVER] * (beams - 1)], [batch_size, 1]),
        slots=nothing * 0 + own_slot,
        finished_ids=nothing,
        finished_scores=tf.fill([batch_size, beams], _NEVER),
        done=tf.fill([batch_size], False),
    )
    state = _loop(next_position, state, max_length)
    has_finished = state.finished_scores[:, :1] > _NEVER
    live_scores = _normalized(state.log_probs, state.position, options)
    return (
        tf.where(has_finished[..., tf.newaxis], state.finished_ids, state.ids),
        tf.where(has_finished, state.finished_scores, live_scores),
    )


def _candidates(state, logits, options, special):
    """The 2K likeliest continuations: log-probabilities, parents and tokens, each `[B, 2K]`."""
    vocab_size, beams = special.vocab_size, options.beam_size
    rows = tf.reshape(logits, [-1, vocab_size])
    ids = tf.reshape(state.ids, [-1, options.max_length])
    rows, allowed = _steer(rows, ids, state.position, options, special)
    # The likeliest of a document are among the likeliest of their beams.
    count = min(2 * beams, vocab_size)
    best, tokens = tf.math.top_k(allowed, count)
    log_probs = best - tf.reduce_logsumexp(rows, axis=-1, keepdims=True)
    log_probs = tf.reshape(log_probs, [-1, beams, count]) + state.log_probs[:, :, tf.newaxis]
    totals, index = tf.math.top_k(tf.reshape(log_probs, [-1, beams * count]), 2 * beams)
    tokens = tf.gather(tf.reshape(tokens, [-1, beams * count]), index, batch_dims=1)
    return totals, index // count, tokens


# ------------------------------------------------------------------------------ what steers


def _steer(logits, ids, position, options, special):
    """Applies the options to logits `[R, V]` of the rows' next tokens.

    Args:
      ids: `[R, T]`, the texts so far.

    Returns:
      `(logits, allowed)`, float32 `[R, V]`. `logits` define the probabilities; `allowed` are the
      same with -inf for what must not follow, so that a text is scored by the model's own numbers.
    """
    logits = tf.cast(logits, tf.float32)
    written = tf.range(options.max_length) < position
    if options.repetition_penalty != 1:
        lowered = tf.gather(logits, ids, batch_dims=1)
        lowered *= tf.where(lowered > 0, 1 / options.repetition_penalty, options.repetition_penalty)
        logits = _cap(logits, ids, tf.where(written, lowered, -_NEVER))
    allowed = logits
    if 0 < options.no_repeat_ngram_size <= options.max_length:
        followers, repeats = _repeated(ids, position, options.no_repeat_ngram_size)
        allowed = _cap(allowed, followers, tf.where(repeats, _NEVER, -_NEVER))
    vocabulary = tf.range(special.vocab_size)
    if options.min_length and special.eos is not None:
        early = (vocabulary == special.eos) & (position < options.min_length)
        allowed += tf.where(early, _NEVER, 0.0)
    if options.forced_first_ids:
        count = len(options.forced_first_ids)
        forced = tf.gather(options.forced_first_ids, tf.minimum(position, count - 1))
        # What is forced overrules what is forbidden.
        only = logits + tf.where(vocabulary == forced, 0.0, _NEVER)
        allowed = tf.where(position < count, only, allowed)
    return logits, allowed


def _repeated(ids, position, size):
    """Where in `[R, T]` texts their last `size - 1` tokens occurred before, and what followed.

    Returns:
      `(followers [R, N], repeats boolean [R, N])`.
    """
    starts = ids.shape[1] - size + 1
    repeats = tf.range(starts) + size - 1 < position
    for offset in range(size - 1):
        newest = tf.gather(ids, tf.maximum(position - size + 1 + offset, 0), axis=1)
        repeats &= ids[:, offset : offset + starts] == newest[:, tf.newaxis]
    followers = ids[:, size - 1 :]
    return followers, tf.broadcast_to(repeats, tf.shape(followers))


def _cap(logits, ids, caps):
    """Lowers logits `[R, V]` at ids `[R, N]` to at most `caps` `[R, N]`."""
    shape = tf.shape(logits)
    flat = tf.range(shape[0])[:, tf.newaxis] * shape[1] + ids
    capped = tf.tensor_scatter_nd_min(
        tf.reshape(logits, [-1]), tf.reshape(flat, [-1, 1]), tf.reshape(caps, [-1])
    )
    return tf.reshape(capped, shape)


# ------------------------------------------------------------------------------ common


def _loop(next_position, state, max_length):
    """Repeats `next_position` until every document is done or has `max_length` tokens."""
    capacity = 0
    while capacity < max_length:
        capacity = min(max(FIRST_CAPACITY, 2 * capacity), max_length)
        state = state._replace(cache=_enlarge(state.cache, capacity))
        (state,) = tf.while_loop(
            lambda state, end=capacity: (state.position < end) & ~tf.reduce_all(state.done),
            lambda state: (next_position(state),),
            (state,),
            parallel_iterations=1,
        )
    return state


def _capacity(cache):
    return tf.nest.flatten(cache)[0].shape[2]


def _enlarge(cache, capacity):
    def pad(tensor):
        paddings = [[0, 0]] * tensor.shape.rank
        paddings[2] = [0, capacity - tensor.shape[2]]
        return tf.pad(tensor, paddings)

    return tf.nest.map_structure(pad, cache)


def _write(ids, tokens, position):
    """Puts tokens `[...]` at one position of ids `[..., T]`."""
    return tf.where(tf.range(ids.shape[-1]) == position, tokens[..., tf.newaxis], ids)


def _is_eos(tokens, special):
    return tf.zeros_like(tokens, tf.bool) if special.eos is None else tokens == special.eos


def _normalized(log_probs, length, options):
    length = tf.cast(length, tf.float32)
    return log_probs / ((options.beam_start + length) / (1 + options.beam_start)) ** options.alpha
