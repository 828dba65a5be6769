"""Benchmark of decoding: the cached search against a plain one that keeps nothing of the document.

    python -m benchmarks.bench_decode                          # everything, about ten minutes
    python -m benchmarks.bench_decode --repeats=2 --modes=graph --beams=1,5

The plain search is written from the equations, with the weights of the same model: it projects the
whole document to keys and values at every step, for every beam again, reorders its cache, attends
over all positions there could be, and takes its candidates from a softmax over beams × vocabulary.
Both must find the same texts. Every text has all its steps; the last part ends texts early, where a
step should cost the same whatever the longest text allowed.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import tensorflow as tf

from benchmarks import harness
from bigbird.core.beam_search import DecodingOptions
from bigbird.core.modeling import TransformerModel

BATCH, LENGTH, STEPS = 4, 1024, 128
PARAMS = {
    "vocab_size": 8000,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "max_encoder_length": LENGTH,
    "max_position_embeddings": 1024,
    "max_decoder_length": STEPS,
    "block_size": 64,
}
# Tokens of the texts that end early, and how long they might have been.
SHORT, LONGEST = 32, (64, 128, 256, 512, 1024)


class PlainSearch:
    """Greedy and beam search of a post-norm model, every step from the equations.

    Axis letters: R rows (documents × beams), T steps, L length, D model, H heads, V vocabulary.
    """

    def __init__(self, model, beams, steps):
        self.model, self.beams, self.steps = model, beams, steps

    def __call__(self, input_ids):
        """Returns the likeliest text of `steps` tokens of every document, `[B, T]`."""
        batch, beams = input_ids.shape[0], self.beams
        encoded, mask = self.model.encode(input_ids, training=False)
        encoded, mask = tf.repeat(encoded, beams, axis=0), tf.repeat(mask, beams, axis=0)
        rows = batch * beams
        empty = tf.zeros([rows, self.steps, self.model.config.hidden_size])
        cache = [(empty, empty) for _ in self.model.decoder.decoder_layers]
        ids = tf.zeros([rows, self.steps], tf.int32)
        tokens = tf.fill([rows], self.model.config.bos_token_id)
        totals = tf.tile([[0.0] + [-np.inf] * (beams - 1)], [batch, 1])

        def body(position, tokens, ids, totals, cache):
            logits, cache = self._logits(position, tokens, cache, encoded, mask)
            log_probs = tf.nn.log_softmax(logits)
            vocab_size = log_probs.shape[-1]
            # No text may end.
            log_probs += tf.one_hot(self.model.config.eos_token_id, vocab_size, -np.inf, 0.0)
            grown = tf.reshape(totals, [rows, 1]) + log_probs
            totals, index = tf.math.top_k(tf.reshape(grown, [batch, -1]), beams)
            parents = index // vocab_size + tf.range(batch)[:, tf.newaxis] * beams
            parents, tokens = tf.reshape(parents, [-1]), tf.reshape(index % vocab_size, [-1])
            ids, *cache = (tf.gather(x, parents) for x in (ids, *tf.nest.flatten(cache)))
            ids = tf.where(tf.range(self.steps) == position, tokens[:, tf.newaxis], ids)
            return (
                position + 1,
                tokens,
                ids,
                totals,
                list(zip(cache[::2], cache[1::2], strict=True)),
            )

        _, _, ids, _, _ = tf.while_loop(
            lambda position, *_: position < self.steps, body, (0, tokens, ids, totals, cache)
        )
        return ids[::beams]

    def _logits(self, position, tokens, cache, encoded, mask):
        embeddings = self.model.embeddings
        hidden = tf.gather(embeddings.word_embeddings, tokens[:, tf.newaxis])
        hidden = self.model.decoder.layer_norm(hidden + embeddings.position_embeddings[position])
        here = (tf.range(self.steps) == position)[:, tf.newaxis]
        past = (tf.range(self.steps) <= position)[tf.newaxis]
        written = []
        for layer, (keys, values) in zip(self.model.decoder.decoder_layers, cache, strict=True):
            attention, cross = layer.attention, layer.cross_attention
            keys = tf.where(here, attention.key(hidden), keys)
            values = tf.where(here, attention.value(hidden), values)
            written.append((keys, values))
            context = self._attend(attention.query(hidden), keys, values, past)
            hidden = layer.attention_norm(hidden + layer.attention_output(context))
            context = self._attend(
                cross.query(hidden), cross.key(encoded), cross.value(encoded), mask
            )
            hidden = layer.cross_norm(hidden + layer.cross_output(context))
            inner = layer.output_dense(layer.intermediate(hidden))
            hidden = layer.output_norm(hidden + inner)
        return tf.einsum("RD,VD->RV", hidden[:, 0], embeddings.word_embeddings), written

    def _attend(self, query, keys, values, mask):
        heads = self.model.config.num_attention_heads
        query, keys, values = (
            tf.reshape(x, [x.shape[0], x.shape[1], heads, -1]) for x in (query, keys, values)
        )
        scores = tf.einsum("RTHE,RLHE->RHTL", query, keys) / query.shape[-1] ** 0.5
        scores = tf.where(mask[:, tf.newaxis, tf.newaxis], scores, -np.inf)
        context = tf.einsum("RHTL,RLHE->RTHE", tf.nn.softmax(scores), values)
        return tf.reshape(context, [*context.shape[:2], -1])


def _compiled(fn, mode):
    return tf.function(fn, autograph=False, jit_compile=mode == "xla")


def _row(variant, mode, beams, steps, timing):
    shape = f"B={BATCH} L={LENGTH} T={steps} K={beams}"
    return harness.Row(variant, mode, shape, "float32", timing=timing)


def searches(model, documents, beams, mode):
    """Returns the cached and the plain search as functions, which find the same texts.

    Raises:
      RuntimeError: If they do not.
    """
    options = DecodingOptions(beams, max_length=STEPS, min_length=STEPS)
    cached = _compiled(lambda ids: model.generate(ids, options).ids, mode)
    plain = _compiled(PlainSearch(model, beams, STEPS), mode)
    found, expected = cached(documents).numpy(), plain(documents).numpy()
    if (found == expected).mean() < 0.99:
        raise RuntimeError(f"The searches with {beams} beams find other texts.")
    return {"cached": lambda: cached(documents), "plain": lambda: plain(documents)}


def timed_rows(model, documents, beam_sizes, modes, repeats):
    """Times the two searches turn by turn."""
    for mode in modes:
        for beams in beam_sizes:
            timings = harness.measure_in_turn(searches(model, documents, beams, mode), repeats)
            for variant, timing in timings.items():
                yield _row(variant, mode, beams, STEPS, timing)


def short_rows(model, documents, mode, repeats):
    """Times texts that end early, by the longest text allowed; every one has `SHORT` tokens."""
    forced = (5,) * (SHORT - 1) + (model.config.eos_token_id,)
    for beams in (1, 5):
        steps = {}
        for longest in LONGEST:
            options = DecodingOptions(beams, max_length=longest, forced_first_ids=forced)
            search = _compiled(lambda ids, options=options: model.generate(ids, options).ids, mode)
            steps[longest] = lambda search=search: search(documents)
        for longest, timing in harness.measure_in_turn(steps, repeats).items():
            yield _row(f"cached, {SHORT} tokens", mode, beams, longest, timing)


def main():
    """Measures, prints the ratios, writes CSV and PNG."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--modes", default="graph,xla")
    parser.add_argument("--beams", default="1,2,5,8")
    parser.add_argument("--short", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    modes = arguments.modes.split(",")
    beam_sizes = [int(beams) for beams in arguments.beams.split(",")]

    model = TransformerModel(PARAMS)
    documents = tf.random.stateless_uniform([BATCH, LENGTH], [0, 0], 3, 8000, tf.int32)
    rows = []
    for row in timed_rows(model, documents, beam_sizes, modes, arguments.repeats):
        rows.append(row)
        print(row, flush=True)
        if row.variant == "plain":
            ratio = rows[-2].timing.p50 / row.timing.p50
            print(f"{row.mode}, {row.shape}: cached takes {ratio:.2f} of plain", flush=True)
    if arguments.short:
        for row in short_rows(model, documents, modes[0], arguments.repeats):
            rows.append(row)
            print(row, flush=True)
    harness.write_csv(harness.RESULTS / "decode.csv", rows)
    draw(rows)


def draw(rows):
    """Draws seconds against beams, a line per search and mode."""
    series = {}
    for row in rows:
        if row.variant in ("cached", "plain"):
            beams = int(row.shape.rpartition("=")[2])
            series.setdefault(f"{row.variant}, {row.mode}", []).append((beams, row.timing.p50))
    harness.draw(
        harness.RESULTS / "decode.png",
        series,
        xlabel="beams",
        ylabel="seconds",
        title=f"{STEPS} tokens for each of {BATCH} documents of {LENGTH} tokens",
    )


if __name__ == "__main__":
    sys.exit(main())
