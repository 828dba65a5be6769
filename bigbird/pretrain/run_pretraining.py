"""Command: pretrains an encoder on masked words, evaluates and exports it.

    bigbird-pretrain --data_dir=builtin://documents --vocab_model_file=builtin --do_eval

The way of a run: flags -> documents, checked -> `masking.WordMasker` -> `BertPretrainer` ->
`training.train`, `training.evaluate`, `training.export_saved_model`. Its output directory is an
`--init_checkpoint` of every command.
"""

from __future__ import annotations

import functools
import os

from bigbird.core import commands, flags, training
from bigbird.core.config import BigBirdConfig
from bigbird.core.data import ExampleSource, encode_documents, open_source
from bigbird.core.memory import fitting_policy
from bigbird.core.optimization import LinearWarmupLinearDecay
from bigbird.core.vocabulary import Tokenizer, find_vocabulary
from bigbird.pretrain.batches import RecordParser, open_records, pretraining_dataset
from bigbird.pretrain.heads import MaskedLMLayer, NSPLayer
from bigbird.pretrain.masking import WordMasker
from bigbird.pretrain.model import BertPretrainer, ServedEncoder

__all__ = ["MaskedLMLayer", "NSPLayer", "input_fn_builder", "main", "run"]

FLAGS = flags.FLAGS

# Flags that say what a pretrained model computes.
_MODEL_FLAGS = (*commands.MODEL_FLAGS, "cls_id", "sep_id", "mask_id", "use_nsp")
_TRAINING_FLAGS = (
    *commands.TRAINING_FLAGS,
    "masked_lm_prob",
    "max_predictions_per_seq",
    "preprocessed_data",
)

flags.define_task_flags(
    data_dir="tfds://wiki40b/en",
    max_encoder_length=512,
    substitute_newline=" ",
    batch_size=4,
    optimizer="AdamWeightDecay",
    learning_rate=1e-4,
    num_train_steps=100000,
    num_warmup_steps=10000,
    save_checkpoints_steps=1000,
)
commands.define_command_flags(predicts=False)
flags.DEFINE_integer("max_predictions_per_seq", 75, "Pieces to predict in a sequence, at most.")
flags.DEFINE_float("masked_lm_prob", 0.15, "Share of the words that is hidden.")
flags.DEFINE_integer("max_eval_steps", 100, "Batches of the evaluation, at most; 0 for all.")
flags.DEFINE_bool(
    "preprocessed_data", False, "Whether the data are TFRecords that are tokenised and masked."
)
flags.DEFINE_bool("use_nsp", False, "Whether to learn next sentences, from preprocessed data.")


def input_fn_builder(
    data_dir,
    vocab_model_file,
    masked_lm_prob,
    max_encoder_length,
    max_predictions_per_seq,
    preprocessed_data,
    substitute_newline,
    is_training,
    tmp_dir=None,
):
    """Returns `input_fn(params)`, which gives batches of features; see `masking.WordMasker`.

    Args:
      data_dir: `tfds://…`, `builtin://…`, a directory or a file.
      is_training: shuffled and endless from the training split, or once over the test split.
      tmp_dir: where TFDS finds prepared data sets.

    Returns:
      A function of a dict with `batch_size`.
    """

    def input_fn(params):
        tokenizer = Tokenizer(find_vocabulary(vocab_model_file))
        make_features = _feature_maker(
            tokenizer,
            preprocessed_data,
            max_encoder_length,
            max_predictions_per_seq,
            masked_lm_prob,
            substitute_newline,
        )
        split = "train" if is_training else "test"
        tfds_data_dir = tmp_dir or FLAGS["tfds_data_dir"].value
        source = _open(data_dir, split, make_features, tokenizer.vocab_size, tfds_data_dir)
        return pretraining_dataset(
            source,
            make_features,
            params["batch_size"],
            training=is_training,
            seed=FLAGS["seed"].value,
        )

    return input_fn


def _open(data_dir, split, make_features, vocab_size, tfds_data_dir) -> ExampleSource:
    if isinstance(make_features, RecordParser):
        return open_records(data_dir, split, make_features, vocab_size)
    return open_source(data_dir, split, ("text",), tfds_data_dir)


def _feature_maker(
    tokenizer: Tokenizer,
    preprocessed_data: bool,
    max_encoder_length: int,
    max_predictions_per_seq: int,
    masked_lm_prob: float,
    substitute_newline: str,
) -> WordMasker | RecordParser:
    if preprocessed_data:
        return RecordParser(max_encoder_length, max_predictions_per_seq)
    return WordMasker(
        tokenizer,
        flags.special_tokens(),
        max_encoder_length,
        max_predictions_per_seq,
        masked_lm_prob,
        substitute_newline,
    )


def _batches(source, make_features, *, is_training=False, start_step=0):
    """Gives `(features, features)`, as Keras takes them."""
    batches = pretraining_dataset(
        source,
        make_features,
        FLAGS.train_batch_size if is_training else FLAGS.eval_batch_size,
        training=is_training,
        seed=FLAGS.seed,
        start_step=start_step,
        crop_to_block=FLAGS.block_size if FLAGS.pad_to_batch else None,
        pad_id=FLAGS.pad_id,
    )
    if not is_training and FLAGS.max_eval_steps:
        batches = batches.take(FLAGS.max_eval_steps)
    return batches.map(lambda features: (features, features))


def _compiled_model(config: BigBirdConfig, settings: training.TrainingSettings) -> BertPretrainer:
    with commands.model_scope():
        model = BertPretrainer(config, FLAGS.use_nsp)
        schedule = LinearWarmupLinearDecay(
            FLAGS.learning_rate, FLAGS.num_train_steps, FLAGS.num_warmup_steps
        )
        model.compile(commands.optimizer(schedule), **settings.compile_arguments())
    return model


def _encoder_of_strings(tokenizer: Tokenizer):
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


def main(_):
    """Does what the flags ask: trains, evaluates, exports, in this order."""
    commands.check_command_flags()
    commands.adopt_run(_MODEL_FLAGS)
    if FLAGS.use_nsp and not FLAGS.preprocessed_data:
        raise ValueError(
            "--use_nsp needs --preprocessed_data: a document alone has no second segment."
        )
    settings = commands.training_settings(best_metric="masked_lm_loss", best_mode="min")
    config = flags.model_config()
    tokenizer = Tokenizer(find_vocabulary(FLAGS.vocab_model_file))
    make_features = _feature_maker(
        tokenizer,
        FLAGS.preprocessed_data,
        FLAGS.max_encoder_length,
        FLAGS.max_predictions_per_seq,
        FLAGS.masked_lm_prob,
        FLAGS.substitute_newline,
    )

    def open_split(split):
        return _open(FLAGS.data_dir, split, make_features, config.vocab_size, FLAGS.tfds_data_dir)

    sources = commands.open_sources(open_split, "test", "text")
    config = fitting_policy(config, FLAGS.train_batch_size, FLAGS.optimizer)
    model = _compiled_model(config, settings)
    print(f"The model has {model.count_params():,} parameters.")
    commands.load_init_checkpoint(model.bert, model.heads)

    if FLAGS.do_train:
        validation = sources.get(FLAGS.validation_split)
        training.train(
            model,
            lambda start_step: _batches(
                sources["train"], make_features, is_training=True, start_step=start_step
            ),
            settings,
            config=commands.identity(config, (*_MODEL_FLAGS, *_TRAINING_FLAGS)),
            validation_dataset=validation and _batches(validation, make_features),
        )
        step = settings.num_train_steps
    else:
        step = commands.weights_of_the_run(model)

    if FLAGS.do_eval:
        test = _batches(sources["test"], make_features)
        for name, value in training.evaluate(model, test, settings, step).items():
            print(f"{name} = {value}")
    if FLAGS.do_export:
        path = os.path.join(settings.output_dir, "export")
        training.export_saved_model(ServedEncoder(model, _encoder_of_strings(tokenizer)), path)
        print(f"Exported to {path}.")


def run():
    """Entry of the installed command."""
    flags.run(main)


if __name__ == "__main__":
    run()
