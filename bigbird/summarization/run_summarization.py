"""Command: trains and evaluates a summarizer of long documents, summarises files, exports it.

    bigbird-summarize --data_dir=builtin://summaries --vocab_model_file=builtin --do_eval --do_export

The way of a run: flags -> pairs, checked and counted -> `Summarizer` -> `training.train`,
`evaluate` (loss, then summaries and their ROUGE), `training.export_saved_model`, `summarize_file`.
"""

from __future__ import annotations

from bigbird.core import commands, flags
from bigbird.core.data import open_source
from bigbird.core.pairs import PairEncoder, pair_dataset
from bigbird.core.vocabulary import Tokenizer, find_vocabulary
from bigbird.summarization.loss import padded_cross_entropy_loss

__all__ = ["input_fn_builder", "main", "padded_cross_entropy_loss", "pair_encoder", "run"]

FLAGS = flags.FLAGS
FIELDS = ("document", "summary")

flags.define_task_flags(
    data_dir="tfds://scientific_papers/pubmed",
    max_encoder_length=128,
    substitute_newline=None,
    batch_size=8,
    optimizer="Adafactor",
    learning_rate=0.32,
    num_train_steps=1000,
    num_warmup_steps=100,
    save_checkpoints_steps=2000,
)
commands.define_command_flags()
flags.DEFINE_integer("max_decoder_length", 128, "Tokens of a summary with its end, at most.")
flags.DEFINE_float("label_smoothing", 0.1, "Share of the target that is spread over all tokens.")
flags.DEFINE_string("eval_split", "validation", "Split that --do_eval reads.")
flags.DEFINE_integer(
    "max_eval_steps",
    100,
    "Batches of the evaluation that are summarised for ROUGE, at most; 0 for all. The loss is "
    "always that of every example.",
)
flags.DEFINE_integer("lead_sentences", 3, "Sentences of the baseline that ROUGE is printed beside.")


def pair_encoder(tokenizer: Tokenizer) -> PairEncoder:
    """Returns what turns texts into ids and back, as the flags say."""
    return PairEncoder(
        tokenizer,
        flags.special_tokens(),
        FLAGS.max_encoder_length,
        FLAGS.max_decoder_length,
        FLAGS.substitute_newline,
        FLAGS.block_size,
    )


def input_fn_builder(
    data_dir,
    vocab_model_file,
    max_encoder_length,
    max_decoder_length,
    substitute_newline,
    is_training,
    tmp_dir=None,
):
    """Returns `input_fn(params)`, which gives batches of ids `(documents [B, L], summaries [B, T])`.

    Args:
      data_dir: `tfds://…`, `builtin://…`, a directory or a file.
      is_training: shuffled and endless from the training split, or once over the validation split.
      tmp_dir: where TFDS finds prepared data sets.

    Returns:
      A function of a dict with `batch_size`.
    """

    def input_fn(params):
        encoder = PairEncoder(
            Tokenizer(find_vocabulary(vocab_model_file)),
            flags.special_tokens(),
            max_encoder_length,
            max_decoder_length,
            substitute_newline,
            FLAGS["block_size"].value,
        )
        source = open_source(
            data_dir,
            "train" if is_training else "validation",
            FIELDS,
            tmp_dir or FLAGS["tfds_data_dir"].value,
        )
        return pair_dataset(
            source,
            encoder,
            params["batch_size"],
            training=is_training,
            seed=FLAGS["seed"].value,
            pad_to_batch=FLAGS["pad_to_batch"].value,
        )

    return input_fn
