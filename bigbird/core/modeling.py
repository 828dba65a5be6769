"""The models: `BertModel`, an encoder, and `TransformerModel`, with a decoder. Start reading here.

Axis letters, the same in every module: B batch, L length, T target length, D model width, H heads,
E width of a head, N blocks, S block size, R random blocks, V vocabulary.

BertModel:

    input_ids [B, L] ──> TransformerEmbedding ──> EncoderStack ──> sequence_output [B, L, D]
          │                 (layers.py)           (encoder.py)            │
          └── id ≠ pad ──> mask [B, L] ──────────────┘              first token
                                                                          │
                                                  pooler ──> pooled_output [B, D]

TransformerModel:

    input_ids [B, L] ──> TransformerEmbedding ──> EncoderStack ──> encoder_output [B, L, D]
                            │          │                                 │
    target_ids [B, T] ──> shifted ──> embedded ──> DecoderStack ──> hidden [B, T, D]
                                                   (decoder.py)          │
               embedding table, transposed ──> vocabulary_logits ──> logits [B, T, V]

and, where there are no targets, `generate`: a search (beam_search.py) that asks the decoder for one
position at a time.

Reading order: `config.py` (what a model is made of), this file, `layers.py` (embeddings),
`encoder.py` (the layer and its stack), `attention.py` (who attends to whom, and how),
`block_layout.py` (which blocks meet), `recompute_grad.py` (trading time for memory), `decoder.py`
(the other half of an encoder-decoder), `beam_search.py` (finding texts).
"""

from __future__ import annotations

import tensorflow as tf
import tf_keras as keras

from bigbird.core.beam_search import Decoded, DecodingOptions, SpecialIds, decode
from bigbird.core.config import BigBirdConfig
from bigbird.core.decoder import DecoderStack
from bigbird.core.encoder import EncoderStack
from bigbird.core.layers import TransformerEmbedding, build_in_scope, create_initializer


class BertModel(keras.Model):
    """Encoder of documents: embeddings, encoder stack and a pooler over the first token.

    pooled = tanh(W sequence_output[0] + b)

    All shapes follow from the configuration, so the variables exist as soon as the model does,
    under their 2021 names (`bert/encoder/layer_0/attention/self/query/kernel`, …).

    Example:
      >>> model = BertModel({"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000})
      >>> sequence_output, pooled_output = model(tf.ones([2, 700], tf.int32))

    Source: Devlin et al., arXiv:1810.04805; Zaheer et al., arXiv:2007.14062.
    """

    def __init__(self, params, name: str | None = None, **kwargs):
        """Creates the model from a `BigBirdConfig` or a dict of the same keys (left unchanged)."""
        config = BigBirdConfig.from_params(params)
        scope = config.scope
        super().__init__(name=name or scope, **kwargs)
        self.config = config
        self.embeddings = TransformerEmbedding(
            config.vocab_size,
            config.hidden_size,
            config.max_position_embeddings,
            config.type_vocab_size,
            config.hidden_dropout_prob,
            config.initializer_range,
            config.rescale_embedding,
            name=f"{scope}/embeddings",
        )
        self.encoder = EncoderStack(config)
        self.pooler = keras.layers.Dense(
            config.hidden_size,
            activation="tanh",
            kernel_initializer=create_initializer(config.initializer_range),
            name=f"{scope}/pooler/dense",
        )
        self.build([None, None])

    def build(self, input_shape):
        build_in_scope(self.embeddings, input_shape)
        hidden_shape = [*input_shape, self.config.hidden_size]
        build_in_scope(self.encoder, hidden_shape)
        build_in_scope(self.pooler, [input_shape[0], self.config.hidden_size])
        self.built = True

    def call(self, input_ids, token_type_ids=None, training=None):
        """Encodes token ids.

        Args:
          input_ids: int `[B, L]`, L at most `max_encoder_length`; `pad_token_id` is padding.
          token_type_ids: int `[B, L]`; all 0 where None.

        Returns:
          `(sequence_output [B, L, D], pooled_output [B, D])`.

        Raises:
          ValueError: for a static length beyond `max_encoder_length`.
        """
        _check_length(input_ids, "input", "max_encoder_length", self.config)
        mask = tf.not_equal(input_ids, self.config.pad_token_id)
        hidden = self.embeddings(input_ids, token_type_ids, training=training)
        sequence_output = self.encoder(hidden, mask, training=training)
        pooled_output = self.pooler(sequence_output[:, 0])
        return sequence_output, pooled_output

    def get_config(self):
        return {"params": self.config.to_dict(), "name": self.name}


class TransformerModel(keras.Model):
    """Encoder-decoder: documents to texts. One embedding table serves both and the output.

    logits = hidden · Eᵀ, where E is the table of word embeddings

    All variables exist as soon as the model does, under their 2021 names
    (`pegasus/decoder/layer_0/attention/encdec/query/kernel`, …).

    Example:
      >>> model = TransformerModel({"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 99})
      >>> decoded = model.generate(tf.ones([2, 700], tf.int32))
      >>> decoded.ids.shape
      TensorShape([2, 128])

    Source: Vaswani et al., arXiv:1706.03762; Zaheer et al., arXiv:2007.14062, section 4.1.
    """

    def __init__(self, params, name: str | None = None, **kwargs):
        """Creates the model from a `BigBirdConfig` or a dict of the same keys (left unchanged).

        Raises:
          ValueError: for a decoder longer than the position table.
        """
        config = BigBirdConfig.from_params(params)
        if config.max_decoder_length > config.max_position_embeddings:
            raise ValueError(
                f"max_decoder_length={config.max_decoder_length} is beyond the position table "
                f"(max_position_embeddings={config.max_position_embeddings}): shorten "
                "--max_decoder_length or enlarge --max_position_embeddings."
            )
        super().__init__(name=name or config.scope, **kwargs)
        self.config = config
        self.embeddings = TransformerEmbedding(
            config.vocab_size,
            config.hidden_size,
            config.max_position_embeddings,
            dropout_rate=config.hidden_dropout_prob,
            initializer_range=config.initializer_range,
            rescale=config.rescale_embedding,
            name=f"{config.scope}/embeddings",
        )
        self.encoder = EncoderStack(config)
        self.decoder = DecoderStack(config, self.encoder)
        self.build([None, None])

    def build(self, input_shape):
        build_in_scope(self.embeddings, input_shape)
        hidden_shape = [*input_shape, self.config.hidden_size]
        build_in_scope(self.encoder, hidden_shape)
        build_in_scope(self.decoder, hidden_shape)
        self.decoder_position_embeddings = None
        if self.config.own_decoder_positions:
            with tf.name_scope(f"{self.config.scope}/decoder/embeddings/"):
                self.decoder_position_embeddings = self.add_weight(
                    "position_embeddings",
                    [self.config.max_position_embeddings, self.config.hidden_size],
                    initializer=create_initializer(self.config.initializer_range),
                )
        self.built = True

    def call(self, input_ids, target_ids=None, training=None):
        """Scores given targets, and decodes unless it trains.

        Args:
          input_ids: int `[B, L]`, L at most `max_encoder_length`; `pad_token_id` is padding.
          target_ids: int `[B, T]`, T at most `max_decoder_length`, padded behind the text.
          training: True scores `target_ids` and takes the likeliest token at every position as
            `pred_ids`. Otherwise `pred_ids` are decoded with the config's `beam_size` and `alpha`,
            and are scored themselves where there are no targets.

        Returns:
          `((log_probs, logits, pred_ids), encoder_output)`: float32 `[B, T]` log-probabilities of
          the scored ids, 0 where padded; their logits `[B, T, V]`; int32 ids; `[B, L, D]`.

        Raises:
          ValueError: for a static length beyond the model's, or training without targets.
        """
        encoder_output, mask = self.encode(input_ids, training=training)
        if not training:
            search = self._search_in_graph if tf.executing_eagerly() else self._search
            pred_ids = search(encoder_output, mask, self.decoding_options()).ids
            target_ids = pred_ids if target_ids is None else target_ids
        elif target_ids is None:
            raise ValueError("training=True needs target_ids [B, T].")
        hidden = self.decode(target_ids, encoder_output, mask, training=training)
        logits = self.vocabulary_logits(hidden)
        if training:
            pred_ids = tf.argmax(logits, axis=-1, output_type=tf.int32)
        return (self._log_probs(logits, target_ids), logits, pred_ids), encoder_output

    def hidden_states(self, input_ids, target_ids, training=None):
        """Everything of the training path but the projection to the vocabulary.

        Returns:
          `(hidden [B, T, D], encoder_output [B, L, D])`. The logits of `hidden` are its product
          with `output_kernel`.
        """
        encoder_output, mask = self.encode(input_ids, training=training)
        return self.decode(target_ids, encoder_output, mask, training=training), encoder_output

    def encode(self, input_ids, training=None):
        """Encodes documents `[B, L]`: `(encoder_output [B, L, D], mask boolean [B, L])`."""
        _check_length(input_ids, "input", "max_encoder_length", self.config)
        mask = tf.not_equal(input_ids, self.config.pad_token_id)
        hidden = self.embeddings(input_ids, training=training)
        return self.encoder(hidden, mask, training=training), mask

    def decode(self, target_ids, encoder_output, mask, training=None):
        """Hidden states `[B, T, D]` that predict each target from those before it."""
        _check_length(target_ids, "target", "max_decoder_length", self.config)
        starts = tf.fill([tf.shape(target_ids)[0], 1], self.config.bos_token_id)
        starts = tf.cast(starts, target_ids.dtype)
        inputs = tf.concat([starts, target_ids[:, :-1]], axis=1)
        inputs = tf.where(self._is_text(target_ids), inputs, self.config.pad_token_id)
        inputs.set_shape(target_ids.shape)
        hidden = self._embed_targets(inputs, training)
        return self.decoder(hidden, None, encoder_output, mask, training=training)

    def _embed_targets(self, ids, training, first_position=0):
        return self.embeddings(
            ids,
            training=training,
            first_position=first_position,
            position_embeddings=self.decoder_position_embeddings,
        )

    def vocabulary_logits(self, hidden):
        """Projects hidden states `[B, T, D]` to logits `[B, T, V]`, in the compute dtype."""
        table = tf.cast(self.embeddings.word_embeddings, hidden.dtype)
        return tf.einsum("BTD,VD->BTV", hidden, table)

    @property
    def output_kernel(self):
        """The kernel of the projection to the vocabulary, `[D, V]`: the table, transposed."""
        return tf.transpose(tf.cast(self.embeddings.word_embeddings, self.compute_dtype))

    def decoding_options(self, **changes) -> DecodingOptions:
        """Returns the config's `beam_size`, `alpha` and `max_decoder_length` as options."""
        config = self.config
        defaults = {
            "beam_size": config.beam_size,
            "alpha": config.alpha,
            "max_length": config.max_decoder_length,
        }
        return DecodingOptions(**{**defaults, **changes})

    def generate(self, input_ids, options: DecodingOptions | None = None) -> Decoded:
        """Finds a text for every document.

        Runs as one graph, also when it is called eagerly; a new `options` or shape of documents
        traces it anew. Inside a `tf.function(jit_compile=True)` it is compiled by XLA.

        Args:
          input_ids: int `[B, L]`, L at most `max_encoder_length`; `pad_token_id` is padding.
          options: `decoding_options()` where None.

        Returns:
          `Decoded(ids [B, max_length], scores [B])`; ids are padded behind the end-of-text token.

        Raises:
          ValueError: for a static length beyond the model's, or options that the vocabulary or the
            position table cannot meet.
        """
        options = options or self.decoding_options()
        if tf.executing_eagerly():
            return self._generate_in_graph(tf.convert_to_tensor(input_ids), options)
        return self._generate(input_ids, options)

    def _generate(self, input_ids, options):
        encoder_output, mask = self.encode(input_ids, training=False)
        return self._search(encoder_output, mask, options)

    _generate_in_graph = tf.function(_generate, autograph=False)

    def _search(self, encoder_output, mask, options):
        config = self.config
        if options.max_length > config.max_position_embeddings:
            raise ValueError(
                f"max_length={options.max_length} is beyond the position table "
                f"(max_position_embeddings={config.max_position_embeddings}): decode fewer tokens."
            )
        document = self.decoder.read_document(encoder_output)
        # Made once: a product with the transpose of the table would be several times as slow.
        output_kernel = self.output_kernel
        batch_size = tf.shape(encoder_output)[0]
        beams = options.beam_size

        def step(tokens, position, cache, visible):
            rows = tf.reshape(tokens, [-1, 1])
            hidden = self._embed_targets(rows, False, first_position=position)[:, 0]
            hidden, cache = self.decoder.step(
                hidden, beams, position, cache, visible, document, mask
            )
            logits = tf.matmul(hidden, output_kernel)
            return tf.reshape(logits, [-1, beams, config.vocab_size]), cache

        special = SpecialIds(
            config.vocab_size, config.bos_token_id, config.eos_token_id, config.pad_token_id
        )
        cache = self.decoder.empty_cache(batch_size, beams)
        return decode(step, cache, batch_size, options, special)

    _search_in_graph = tf.function(_search, autograph=False)

    def _log_probs(self, logits, target_ids):
        cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(
            target_ids, tf.cast(logits, tf.float32)
        )
        return tf.where(self._is_text(target_ids), -cross_entropy, 0.0)

    def _is_text(self, target_ids):
        return tf.not_equal(target_ids, self.config.pad_token_id)

    def get_config(self):
        return {"params": self.config.to_dict(), "name": self.name}


def _check_length(ids, kind, field, config):
    length, longest = ids.shape[1], getattr(config, field)
    if length is not None and length > longest:
        raise ValueError(
            f"The {kind} has {length} tokens and the model is built for {field}={longest}: cut the "
            f"{kind} or build a longer model."
        )
