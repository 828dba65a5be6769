"""Command: trains and evaluates a summarizer of long documents, summarises files, exports it.

    bigbird-summarize --data_dir=builtin://summaries --vocab_model_file=builtin \
        --do_eval --do_export

The way of a run: flags -> pairs, checked and counted -> `Summarizer` -> `training.train`,
`evaluate` (loss, then summaries and their ROUGE), `training.export_saved_model`, `summarize_file`.
"""

from __future__ import annotations

import dataclasses
import os

import tensorflow as tf
from absl import logging

from bigbird.core import commands, flags, training
from bigbird.core.beam_search import DecodingOptions, SpecialIds
from bigbird.core.config import BigBirdConfig
from bigbird.core.data import ExampleSource, open_source
from bigbird.core.memory import fitting_policy
from bigbird.core.optimization import InverseSqrtWarmup
from bigbird.core.pairs import PairEncoder, pair_dataset, survey_pairs, warn_of_empty_documents
from bigbird.core.predictions import predict_to_file, read_predictions
from bigbird.core.vocabulary import Tokenizer, find_vocabulary
from bigbird.summarization import rouge
from bigbird.summarization.loss import padded_cross_entropy_loss
from bigbird.summarization.model import ServedSummarizer, Summarizer, plan_training

__all__ = ["input_fn_builder", "main", "padded_cross_entropy_loss", "pair_encoder", "run"]

FLAGS = flags.FLAGS
FIELDS = ("document", "summary")

# Flags that say what a trained summarizer computes; how it searches may change.
_MODEL_FLAGS = (
    *commands.MODEL_FLAGS,
    "max_decoder_length",
    "num_decoder_layers",
    "couple_encoder_decoder",
    "own_decoder_positions",
    "eos_id",
    "bos_id",
)
_TRAINING_FLAGS = (*commands.TRAINING_FLAGS, "label_smoothing")

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
flags.DEFINE_integer("num_decoder_layers", None, "Layers of the decoder; the encoder's if unset.")
flags.DEFINE_bool("couple_encoder_decoder", False, "Whether the decoder shares its weights.")
flags.DEFINE_bool(
    "own_decoder_positions", False, "Whether the decoder has a position table of its own."
)
flags.DEFINE_float("label_smoothing", 0.1, "Share of the target that is spread over all tokens.")

# How summaries are searched for.
flags.DEFINE_integer("beam_size", 5, "Texts followed at once; 1 is greedy, or sampling.")
flags.DEFINE_float("alpha", 0.8, "Exponent of the length normalisation; 0 does not normalise.")
flags.DEFINE_float("beam_start", 5.0, "Length at which the normalisation starts.")
flags.DEFINE_bool("early_stopping", True, "Whether to stop at the first --beam_size good texts.")
flags.DEFINE_integer("min_length", 0, "Tokens of a summary before its end, at least.")
flags.DEFINE_integer("no_repeat_ngram_size", 0, "n of the n-grams that may occur once; 0 for none.")
flags.DEFINE_float("repetition_penalty", 1.0, "More than 1 makes tokens that occurred unlikelier.")
flags.DEFINE_list("forced_first_ids", [], "Ids that every summary begins with.")
flags.DEFINE_bool("sample", False, "Whether to draw tokens by their probability; --beam_size=1.")
flags.DEFINE_float("temperature", 1.0, "Divides the logits before a draw.")
flags.DEFINE_integer("top_k", 0, "Draws from so many likeliest tokens; 0 from all.")
flags.DEFINE_float("top_p", 1.0, "Draws from the likeliest tokens that have this probability.")

# Evaluation.
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
    """Returns `input_fn(params)`, which gives ids of documents `[B, L]` and summaries `[B, T]`.

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


def decoding_options() -> DecodingOptions:
    """Returns how summaries are searched for, as the flags say.

    Raises:
      ValueError: for flags outside their ranges.
    """
    return DecodingOptions(
        beam_size=FLAGS.beam_size,
        max_length=FLAGS.max_decoder_length,
        min_length=FLAGS.min_length,
        alpha=FLAGS.alpha,
        beam_start=FLAGS.beam_start,
        early_stopping=FLAGS.early_stopping,
        sample=FLAGS.sample,
        temperature=FLAGS.temperature,
        top_k=FLAGS.top_k,
        top_p=FLAGS.top_p,
        seed=FLAGS.seed,
        no_repeat_ngram_size=FLAGS.no_repeat_ngram_size,
        repetition_penalty=FLAGS.repetition_penalty,
        forced_first_ids=_forced_first_ids(),
    )


def _forced_first_ids() -> tuple[int, ...]:
    try:
        return tuple(map(int, FLAGS.forced_first_ids))
    except ValueError as error:
        raise ValueError(
            f"--forced_first_ids={','.join(FLAGS.forced_first_ids)}: expected numbers with commas "
            "between them."
        ) from error


def _check_evaluation():
    for name, least in (("max_eval_steps", 0), ("lead_sentences", 1)):
        if FLAGS[name].value < least:
            raise ValueError(f"--{name}={FLAGS[name].value}: expected at least {least}.")


def _open_split(split) -> ExampleSource:
    return open_source(FLAGS.data_dir, split, FIELDS, FLAGS.tfds_data_dir)


def _batches(source, encoder, *, is_training=False, start_step=0):
    """Gives `((document ids, target ids), target ids)`, as Keras takes them."""
    pairs = pair_dataset(
        source,
        encoder,
        FLAGS.train_batch_size if is_training else FLAGS.eval_batch_size,
        training=is_training,
        seed=FLAGS.seed,
        start_step=start_step,
        pad_to_batch=FLAGS.pad_to_batch,
    )
    return pairs.map(lambda documents, targets: ((documents, targets), targets))


def _compiled_model(config: BigBirdConfig, settings: training.TrainingSettings) -> Summarizer:
    with commands.model_scope():
        model = Summarizer(config, FLAGS.label_smoothing)
        schedule = InverseSqrtWarmup(
            FLAGS.learning_rate, config.hidden_size, FLAGS.num_warmup_steps
        )
        model.compile(commands.optimizer(schedule), **settings.compile_arguments())
    return model


def summarize_file(
    served: ServedSummarizer, source: ExampleSource, output_file, batch_size: int, identity
):
    """Summarises documents, one JSON line each with `index` and `summary`, in their order.

    Killed and called again, it goes on; see `predictions.predict_to_file`.
    """

    def summarize(batch):
        summaries = served.serve(tf.constant(batch["document"]))["summary"].numpy()
        return [{"summary": summary.decode()} for summary in summaries]

    verbose = training.verbosity()
    predict_to_file(source, summarize, output_file, identity, batch_size, verbose)


def score_summaries(source: ExampleSource, path: str, lead_sentences: int) -> dict[str, float]:
    """Prints ROUGE of the summaries in a file, and of the first sentences of the documents.

    Returns:
      Means and ends of the 95 % intervals by name: `rouge1`, `rouge1_low`, `lead3_rouge1`, …
    """
    references, leads = [], []
    for example in source.dataset.as_numpy_iterator():
        references.append(example["summary"].decode())
        leads.append(rouge.lead(example["document"].decode(), lead_sentences))
    summaries = [line["summary"] for line in read_predictions(path)]
    print(f"ROUGE F1 in percent, with 95 % intervals, of {len(references)} summaries:")
    print(f"{'':<8}" + "".join(f"{name:<24}" for name in rouge.ROUGE_TYPES))
    results = {"rouge_examples": len(references)}
    for name, texts in ("model", summaries), (f"lead-{lead_sentences}", leads):
        scores = rouge.rouge(references, texts)
        print(f"{name:<8}" + "".join(f"{estimate!s:<24}" for estimate in scores.values()))
        prefix = "" if texts is summaries else f"lead{lead_sentences}_"
        for kind, estimate in scores.items():
            results[f"{prefix}{kind}"] = estimate.mean
            results[f"{prefix}{kind}_low"] = estimate.low
            results[f"{prefix}{kind}_high"] = estimate.high
    return results


def _first_batches(source: ExampleSource) -> ExampleSource:
    """Returns the examples of the first `max_eval_steps` batches."""
    most = FLAGS.max_eval_steps * FLAGS.eval_batch_size
    if not most or most >= source.num_examples:
        return source
    logging.warning(
        "ROUGE is that of the first %d of %d examples: --max_eval_steps=0 takes all.",
        most,
        source.num_examples,
    )
    return dataclasses.replace(source, dataset=source.dataset.take(most), num_examples=most)


def _evaluate(model, served, source, encoder, settings, step, identity):
    """Scores the loss of every example, then summaries of the model's own, and prints it all."""
    results = training.evaluate(model, _batches(source, encoder), settings, step)
    for name, value in results.items():
        print(f"{name} = {value}")
    part = _first_batches(source)
    path = os.path.join(settings.output_dir, f"eval_summaries_{step}.jsonl")
    summarize_file(served, part, path, settings.eval_batch_size, identity)
    results |= score_summaries(part, path, FLAGS.lead_sentences)
    training.write_results(results, settings.output_dir)
    print(f"The summaries are in {path}.")


def _check_options(options: DecodingOptions, config: BigBirdConfig):
    ids = (config.bos_token_id, config.eos_token_id, config.pad_token_id)
    options.check(SpecialIds(config.vocab_size, *ids))


def _identity_of_summaries(options: DecodingOptions, step: int):
    """Returns what decides the summaries of a document."""
    names = (*_MODEL_FLAGS, "output_dir", "init_checkpoint", "mixed_precision")
    values = {name: FLAGS[name].value for name in names}
    return {**values, **dataclasses.asdict(options), "step": step}


def main(_):
    """Does what the flags ask: trains, evaluates, exports, predicts, in this order."""
    commands.check_command_flags()
    _check_evaluation()
    commands.adopt_run(_MODEL_FLAGS)
    settings = commands.training_settings(best_metric="loss", best_mode="min")
    config, options = flags.model_config(), decoding_options()
    _check_options(options, config)
    encoder = pair_encoder(Tokenizer(find_vocabulary(FLAGS.vocab_model_file)))
    sources = commands.open_sources(_open_split, FLAGS.eval_split, "document")
    if documents := sources.pop("input_file", None):
        warn_of_empty_documents(documents)
    surveys = {split: survey_pairs(source, encoder) for split, source in sources.items()}
    config = fitting_policy(config, FLAGS.train_batch_size, FLAGS.optimizer, plan_training)
    model = _compiled_model(config, settings)
    print(f"The model has {model.transformer.count_params():,} parameters.")
    commands.load_init_checkpoint(model.transformer)

    if FLAGS.do_train:
        entropy = surveys["train"].unigram_entropy
        print(f"The unigram entropy of the training targets is {entropy:.4f} nats per token.")
        validation = sources.get(FLAGS.validation_split)
        training.train(
            model,
            lambda start_step: _batches(
                sources["train"], encoder, is_training=True, start_step=start_step
            ),
            settings,
            config=commands.identity(config, (*_MODEL_FLAGS, *_TRAINING_FLAGS)),
            validation_dataset=validation and _batches(validation, encoder),
        )
        step = settings.num_train_steps
    else:
        step = commands.weights_of_the_run(model)

    served = ServedSummarizer(model.transformer, encoder, options)
    identity = _identity_of_summaries(options, step)
    if FLAGS.do_eval:
        source = sources[FLAGS.eval_split]
        _evaluate(model, served, source, encoder, settings, step, identity)
    if FLAGS.do_export:
        path = os.path.join(settings.output_dir, "export")
        training.export_saved_model(served, path)
        print(f"Exported to {path}.")
    if FLAGS.do_predict:
        output_file = FLAGS.output_file or os.path.join(settings.output_dir, "predictions.jsonl")
        summarize_file(served, documents, output_file, settings.eval_batch_size, identity)
        print(f"Wrote the summaries to {output_file}.")


def run():
    """Entry of the installed command."""
    flags.run(main)


if __name__ == "__main__":
    run()
