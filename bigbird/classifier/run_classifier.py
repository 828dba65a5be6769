"""Command: trains, evaluates, exports and serves a classifier of long documents.

    bigbird-classify --data_dir=builtin://documents --vocab_model_file=builtin --num_labels=5 \
        --do_eval --do_export

The way of a run: flags -> data sources, checked -> `BertClassifier` -> `training.train`,
`training.evaluate`, `training.export_saved_model`, `score_file`. With `--do_train=False` the run
in `--output_dir` says what the model is; flags need not repeat it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import tensorflow as tf
import tf_keras as keras

from bigbird.core import commands, flags, training
from bigbird.core.config import BigBirdConfig
from bigbird.core.data import (
    ExampleSource,
    classification_dataset,
    encode_documents,
    open_source,
)
from bigbird.core.layers import (
    FirstTokenTransform,
    build_in_scope,
    create_initializer,
    get_activation,
)
from bigbird.core.memory import fitting_policy
from bigbird.core.modeling import BertModel
from bigbird.core.optimization import LinearWarmupLinearDecay
from bigbird.core.predictions import predict_to_file
from bigbird.core.recompute_grad import RecomputingDropout
from bigbird.core.vocabulary import Tokenizer, find_vocabulary

FLAGS = flags.FLAGS

# Flags that say what a trained classifier computes.
_MODEL_FLAGS = (*commands.MODEL_FLAGS, "num_labels", "classifier_transform", "cls_id", "sep_id")

flags.define_task_flags(
    data_dir="tfds://imdb_reviews/plain_text",
    max_encoder_length=512,
    substitute_newline=None,
    batch_size=8,
    optimizer="AdamWeightDecay",
    learning_rate=1e-5,
    num_train_steps=16000,
    num_warmup_steps=1000,
    save_checkpoints_steps=1000,
)
commands.define_command_flags()
flags.DEFINE_integer("num_labels", 2, "Number of classes.")
flags.DEFINE_bool(
    "classifier_transform",
    False,
    "Whether the classifier reads the first token through a layer of its own, not the pooler.",
)


class ClassifierLossLayer(keras.layers.Layer):
    """Dropout and a projection to class log-probabilities, with the mean cross entropy.

    log p = log softmax(W drop(x) + b)          loss = -mean_B log p[label]
    """

    def __init__(
        self,
        hidden_size: int,
        num_labels: int,
        dropout_prob: float = 0.0,
        initializer=None,
        use_bias: bool = True,
        name: str = "classifier",
        **kwargs,
    ):
        """Creates the layer and its variables, whose shapes are known."""
        super().__init__(name=name, **kwargs)
        self.hidden_size = hidden_size
        self.num_labels = num_labels
        self.dropout_prob = dropout_prob
        self.initializer = initializer
        self.use_bias = use_bias
        self.dropout = RecomputingDropout(
            dropout_prob, name=f"{name}/dropout", dtype=self.dtype_policy
        )
        build_in_scope(self, [None, hidden_size])

    def build(self, input_shape):
        self.kernel = self.add_weight(
            "kernel",
            [self.hidden_size, self.num_labels],
            initializer=self.initializer or create_initializer(),
        )
        self.bias = None
        if self.use_bias:
            self.bias = self.add_weight("bias", [self.num_labels], initializer="zeros")
        self.built = True

    def call(self, input_tensor, labels=None, training=None):
        """Classifies `[B, D]`.

        Args:
          labels: int `[B]`; without them the loss is 0.

        Returns:
          `(loss [], log_probs float32 [B, classes])`.
        """
        hidden = self.dropout(input_tensor, training=training)
        logits = tf.einsum("BD,DC->BC", hidden, self.kernel)
        if self.use_bias:
            logits += self.bias
        log_probs = tf.nn.log_softmax(tf.cast(logits, tf.float32))
        if labels is None:
            return tf.zeros([]), log_probs
        picked = tf.gather(log_probs, tf.cast(labels, tf.int32), axis=1, batch_dims=1)
        return -tf.reduce_mean(picked), log_probs

    def get_config(self):
        return {
            **super().get_config(),
            "hidden_size": self.hidden_size,
            "num_labels": self.num_labels,
            "dropout_prob": self.dropout_prob,
            "initializer": self.initializer,
            "use_bias": self.use_bias,
        }


class BertClassifier(training.SeededModel):
    """A `BertModel` and a `ClassifierLossLayer`: token ids to class log-probabilities."""

    def __init__(self, params, num_labels: int, classifier_transform: bool = False, **kwargs):
        """Creates the model from a `BigBirdConfig` or a dict of the same keys.

        Args:
          classifier_transform: whether the classifier reads a `FirstTokenTransform`, as Hugging
            Face's does, instead of the pooler.
        """
        super().__init__(**kwargs)
        config = BigBirdConfig.from_params(params)
        self.num_labels = num_labels
        self.classifier_transform = classifier_transform
        self.bert = BertModel(config)
        self.transform = None
        if classifier_transform:
            self.bert.pooler.trainable = False
            self.transform = FirstTokenTransform(
                config.hidden_size,
                get_activation(config.hidden_act),
                config.hidden_dropout_prob,
                config.initializer_range,
                name=f"{config.scope}/classifier/transform",
            )
        self.classifier = ClassifierLossLayer(
            config.hidden_size,
            num_labels,
            config.hidden_dropout_prob,
            create_initializer(config.initializer_range),
            name=f"{config.scope}/classifier",
        )
        self.built = True

    def call(self, input_ids, training=None):
        """`[B, L]` token ids -> float32 `[B, classes]` log-probabilities."""
        sequence_output, hidden = self.bert(input_ids, training=training)
        if self.transform is not None:
            hidden = self.transform(sequence_output, training=training)
        _, log_probs = self.classifier(hidden, training=training)
        return log_probs

    @property
    def heads(self) -> dict[str, keras.layers.Layer]:
        """The heads by their names in `checkpoint.load_initial_weights`."""
        heads = {"classifier": self.classifier, "classifier_transform": self.transform}
        return {name: head for name, head in heads.items() if head is not None}

    def get_config(self):
        return {
            "params": self.bert.config.to_dict(),
            "num_labels": self.num_labels,
            "classifier_transform": self.classifier_transform,
        }


class ServedClassifier(tf.Module):
    """What an export holds: strings in, class probabilities out."""

    def __init__(self, model: BertClassifier, encode, label_names: Sequence[str] | None = None):
        """Serves `model`; `encode` turns strings `[B]` into ids `[B, L]`."""
        super().__init__()
        self.encode = encode
        self.label_names = label_names
        self.exported_variables = model.variables
        # In a closure, since a model as attribute would be exported whole, its training too.
        self._classify = lambda token_ids: model(token_ids, training=False)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="text")])
    def serve(self, text):
        """Returns `probabilities [B, classes]`, the likeliest `label [B]`, and its `name`."""
        with training.inference_context():
            log_probs = self._classify(self.encode(text))
        label = tf.argmax(log_probs, axis=1)
        scores = {"probabilities": tf.exp(log_probs), "label": label}
        if self.label_names:
            scores["name"] = tf.gather(tf.constant(self.label_names), label)
        return scores


def input_fn_builder(
    data_dir,
    vocab_model_file,
    max_encoder_length,
    substitute_newline,
    is_training,
    tmp_dir=None,
):
    """Returns `input_fn(params)`, which gives batches `(ids [B, L], labels [B])`.

    Args:
      data_dir: `tfds://…`, `builtin://…`, a directory or a file.
      is_training: shuffled and endless from the training split, or once over the test split.
      tmp_dir: where TFDS finds prepared data sets.

    Returns:
      A function of a dict with `batch_size`.
    """

    def input_fn(params):
        return _batches(
            _open_split("train" if is_training else "test", data_dir, tmp_dir),
            params["batch_size"],
            vocab_model_file,
            max_encoder_length,
            substitute_newline,
            is_training=is_training,
        )

    return input_fn


def _open_split(split, data_dir=None, tfds_data_dir=None):
    return open_source(
        data_dir or FLAGS.data_dir,
        split,
        fields=("text", "label"),
        tfds_data_dir=tfds_data_dir or FLAGS["tfds_data_dir"].value,
        num_labels=FLAGS["num_labels"].value,
    )


def _batches(
    source,
    batch_size,
    vocab_model_file,
    max_encoder_length,
    substitute_newline,
    is_training,
    start_step=0,
):
    return classification_dataset(
        source,
        Tokenizer(find_vocabulary(vocab_model_file)),
        flags.special_tokens(),
        max_length=max_encoder_length,
        batch_size=batch_size,
        training=is_training,
        seed=FLAGS["seed"].value,
        start_step=start_step,
        substitute_newline=substitute_newline,
        pad_to_batch=FLAGS["pad_to_batch"].value,
        block_size=FLAGS["block_size"].value,
    )


def _batches_of_flags(source, is_training=False, start_step=0):
    return _batches(
        source,
        FLAGS.train_batch_size if is_training else FLAGS.eval_batch_size,
        FLAGS.vocab_model_file,
        FLAGS.max_encoder_length,
        FLAGS.substitute_newline,
        is_training,
        start_step,
    )


def _compiled_model(config: BigBirdConfig, settings: training.TrainingSettings) -> BertClassifier:
    with commands.model_scope():
        model = BertClassifier(config, FLAGS.num_labels, FLAGS.classifier_transform)
        schedule = LinearWarmupLinearDecay(
            FLAGS.learning_rate, FLAGS.num_train_steps, FLAGS.num_warmup_steps
        )
        model.compile(
            commands.optimizer(schedule),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
            **settings.compile_arguments(),
        )
    return model


def _encoder_of_strings():
    tokenizer = Tokenizer(find_vocabulary(FLAGS.vocab_model_file))
    return functools.partial(
        encode_documents,
        tokenizer=tokenizer,
        special=flags.special_tokens(),
        max_length=FLAGS.max_encoder_length,
        substitute_newline=FLAGS.substitute_newline,
        # A pattern that follows the input's length needs that length when the graph is made.
        pad_to_longest=FLAGS.pattern_length == "model",
        block_size=FLAGS.block_size,
    )


def score_file(
    served: ServedClassifier, source: ExampleSource, output_file, batch_size: int, identity
):
    """Scores documents, one JSON line each, in their order.

    A line holds `index`, `label`, `probabilities` and, where classes have names, `name`. Killed and
    called again, it goes on; see `predictions.predict_to_file`.
    """

    def score(batch):
        scores = served.serve(tf.constant(batch["text"]))
        columns = {key: value.numpy().tolist() for key, value in scores.items()}
        if served.label_names:
            columns["name"] = [served.label_names[label] for label in columns["label"]]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    predict_to_file(source, score, output_file, identity, batch_size, training.verbosity())


def _label_names(sources, run):
    """Returns the class names, which must be the same wherever there are some."""
    names = {
        source.description: list(source.label_names) for source in sources if source.label_names
    }
    if run.get("label_names"):
        names[f"the run in {FLAGS.output_dir}"] = run["label_names"]
    if len(set(map(tuple, names.values()))) > 1:
        told = "; ".join(f"{where}: {', '.join(classes)}" for where, classes in names.items())
        raise ValueError(f"Expected the same class names everywhere; received {told}.")
    return next(iter(names.values()), None)


def main(_):
    """Does what the flags ask: trains, evaluates, exports, predicts, in this order."""
    commands.check_command_flags()
    run = commands.adopt_run(_MODEL_FLAGS)
    settings = commands.training_settings(best_metric="accuracy", best_mode="max")
    config = flags.model_config()
    sources = commands.open_sources(_open_split, "test", "text")
    label_names = _label_names(sources.values(), run)
    config = fitting_policy(config, FLAGS.train_batch_size, FLAGS.optimizer)
    model = _compiled_model(config, settings)
    print(f"The model has {model.count_params():,} parameters.")
    commands.load_init_checkpoint(model.bert, model.heads)

    if FLAGS.do_train:
        identity = commands.identity(config, (*_MODEL_FLAGS, *commands.TRAINING_FLAGS))
        validation = sources.get(FLAGS.validation_split)
        training.train(
            model,
            lambda start_step: _batches_of_flags(sources["train"], True, start_step),
            settings,
            config={**identity, "label_names": label_names},
            validation_dataset=validation and _batches_of_flags(validation),
        )
        step = settings.num_train_steps
    else:
        step = commands.weights_of_the_run(model)

    if FLAGS.do_eval:
        test = _batches_of_flags(sources["test"])
        for name, value in training.evaluate(model, test, settings, step).items():
            print(f"{name} = {value}")
    served = ServedClassifier(model, _encoder_of_strings(), label_names)
    if FLAGS.do_export:
        path = os.path.join(settings.output_dir, "export")
        training.export_saved_model(served, path)
        print(f"Exported to {path}.")
    if FLAGS.do_predict:
        output_file = FLAGS.output_file or os.path.join(settings.output_dir, "predictions.jsonl")
        names = (*_MODEL_FLAGS, "output_dir", "init_checkpoint", "mixed_precision")
        identity = {**commands.identity(config, names), "step": step}
        score_file(served, sources["input_file"], output_file, settings.eval_batch_size, identity)
        print(f"Wrote the scores to {output_file}.")


def run():
    """Entry of the installed command."""
    flags.run(main)


if __name__ == "__main__":
    run()
