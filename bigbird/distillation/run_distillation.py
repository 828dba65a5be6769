"""Command: trains a student on a teacher's cache, and compares runs.

    bigbird-distill --cache_dir=runs/cache --held_out_cache_dir=runs/held-out --mode=offline_fused
        --vocab_model_file=builtin --num_hidden_layers=2 --output_dir=runs/student
    bigbird-distill --compare runs/student runs/another

The model flags describe the student. The way of a run: caches, checked -> student -> `Distiller` ->
`training.train` -> `report.html`. Its output directory is an `--init_checkpoint` of every command.
"""

from __future__ import annotations

import json
import os

from bigbird.core import commands, flags, training
from bigbird.core.callbacks import write_atomically
from bigbird.core.checkpoint_formats.pretrained_config import flag_values
from bigbird.core.config import BigBirdConfig
from bigbird.core.optimization import LinearWarmupLinearDecay
from bigbird.core.vocabulary import Tokenizer, find_vocabulary
from bigbird.distillation.cache import TeacherCache
from bigbird.distillation.divergence import TAILS
from bigbird.distillation.monitor import SpeedLog, plan_step
from bigbird.distillation.report import SUMMARY, write_report
from bigbird.distillation.students import LanguageModel
from bigbird.distillation.toolkit_models import (
    TASKS,
    load_keras_file,
    load_teacher,
    load_weights,
    new_model,
)
from bigbird.distillation.trainer import MODES, Distiller, check_cache, check_held_out

FLAGS = flags.FLAGS

# Flags that decide the result of a run, besides the model's.
_DISTILLATION_FLAGS = (
    "task",
    "mode",
    "k",
    "temperature",
    "tail",
    "label_share",
    "state_weight",
    "loss_chunk_tokens",
    "init_checkpoint",
    "optimizer",
    "learning_rate",
    "num_warmup_steps",
    "weight_decay_rate",
    "optimizer_beta1",
    "optimizer_beta2",
    "optimizer_epsilon",
)

flags.define_task_flags(
    data_dir=None,
    max_encoder_length=512,
    substitute_newline=None,
    batch_size=8,
    optimizer="AdamWeightDecay",
    learning_rate=1e-4,
    num_train_steps=10000,
    num_warmup_steps=1000,
    save_checkpoints_steps=1000,
)
flags.DEFINE_string("cache_dir", None, "The teacher's cache that the student learns from.")
flags.DEFINE_string(
    "held_out_cache_dir",
    None,
    "A cache that is scored at every checkpoint and chooses the best one. With all logits (--k=0) "
    "it gives the divergence from the full teacher.",
)
flags.DEFINE_enum("task", "masked_lm", list(TASKS), "What teacher and student do.")
flags.DEFINE_enum(
    "mode",
    "offline_fused",
    list(MODES),
    "Whether the teacher runs beside the student (on the cache's sequences), or its cached logits "
    "are read, and how the loss is computed.",
)
flags.DEFINE_string(
    "teacher",
    None,
    "The teacher of mode online: a checkpoint with a config.json, or a .keras file.",
)
flags.DEFINE_string("head_layer", None, "Layer of a .keras file that is its head; the last one.")
flags.DEFINE_string(
    "hidden_layer",
    None,
    "Layer of a .keras file that gives the hidden states; what its head reads.",
)
flags.DEFINE_integer("max_decoder_length", 128, "Tokens of a summary with its end, at most.")
flags.DEFINE_integer("k", None, "Entries of the cache to read, the likeliest; all where unset.")
flags.DEFINE_float("temperature", 1.0, "Temperature of both sides' probabilities.")
flags.DEFINE_enum("tail", "bucket", list(TAILS), "What the loss makes of words not kept.")
flags.DEFINE_float("label_share", 0.0, "Share of the hard labels' cross entropy in the loss.")
flags.DEFINE_float("state_weight", 0.0, "Weight of the squared distance of hidden states.")
flags.DEFINE_integer("loss_chunk_tokens", None, "Tokens whose logits exist at a time, at most.")
flags.DEFINE_bool("plan_memory", True, "Whether XLA plans the memory of a step beforehand.")
flags.DEFINE_bool("compare", False, "Only lays the runs named behind it over each other.")
flags.DEFINE_string("report_file", "comparison.html", "Where --compare writes.")


def main(arguments):
    """Does what the flags ask: compares runs, or trains and evaluates one."""
    if FLAGS.compare:
        directories = arguments[1:]
        if not directories:
            raise ValueError("--compare needs the output directories of runs behind it.")
        write_report(FLAGS.report_file, directories)
        print(f"Wrote {FLAGS.report_file}.")
        return
    if not FLAGS.cache_dir:
        raise ValueError("Give --cache_dir, the teacher's cache, or --compare.")
    if (
        not FLAGS["data_dir"].using_default_value
        or FLAGS.do_export
        or not (FLAGS.do_train or FLAGS.do_eval)
    ):
        raise ValueError(
            "Expected --do_train or --do_eval, no --data_dir (the data are the cache's) and no "
            "--do_export (the output directory is an --init_checkpoint of every command)."
        )
    if FLAGS.do_eval and not FLAGS.held_out_cache_dir:
        raise ValueError("--do_eval needs --held_out_cache_dir.")
    cache = TeacherCache(FLAGS.cache_dir)
    held_out = TeacherCache(FLAGS.held_out_cache_dir) if FLAGS.held_out_cache_dir else None
    settings = commands.training_settings(best_metric="kl", best_mode="min")
    max_rows = max(c.manifest["max_rows"] for c in (cache, held_out) if c is not None)
    model, config = _compiled_model(cache, max_rows, settings)
    _check(cache, held_out, model.student)
    print(f"The student has {_count(model.student):,} parameters.")
    if FLAGS.do_train:
        _train(model, config, cache, held_out, settings)
        step = settings.num_train_steps
    else:
        step = training.restore_weights(model, settings.output_dir)
    if FLAGS.do_eval:
        batches = held_out.dataset(FLAGS.eval_batch_size, training=False)
        for name, value in training.evaluate(model, batches, settings, step).items():
            print(f"{name} = {value}")


def _train(model, config, cache, held_out, settings):
    def batches(start_step):
        return cache.dataset(
            settings.train_batch_size,
            temperature=FLAGS.temperature,
            k=FLAGS.k,
            seed=FLAGS.seed,
            start_step=start_step,
        )

    summary = {"parameters": _count(model.student), "mode": FLAGS.mode}
    if FLAGS.plan_memory:
        summary["planned_bytes"] = plan_step(model, batches(0).element_spec).total_bytes
        print(f"A step is planned to take {summary['planned_bytes'] / 2**20:,.0f} MiB.")
    tokens_per_step = settings.train_batch_size * cache.manifest["tokens"] / len(cache)
    training.train(
        model,
        batches,
        settings,
        config={**config, "cache": _identity(cache)},
        validation_dataset=held_out and held_out.dataset(FLAGS.eval_batch_size, training=False),
        callbacks=[SpeedLog(settings.output_dir, settings.log_steps, tokens_per_step)],
    )
    path = os.path.join(settings.output_dir, SUMMARY)
    if not os.path.exists(path):
        write_atomically(path, json.dumps(summary, indent=1))
    report = os.path.join(settings.output_dir, "report.html")
    write_report(report, [settings.output_dir])
    print(f"The report is {report}.")


def _compiled_model(cache, max_rows, settings) -> tuple[Distiller, dict]:
    with commands.model_scope():
        packed = "document_ids" in cache.format.fields
        student, config = _student(packed)
        model = Distiller(
            student,
            cache.format.vocab_size,
            mode=FLAGS.mode,
            teacher=_teacher(packed) if FLAGS.mode == "online" else None,
            temperature=FLAGS.temperature,
            tail=FLAGS.tail,
            label_share=FLAGS.label_share,
            alignment=cache.manifest["alignment"],
            state_weight=FLAGS.state_weight,
            state_width=cache.format.state_width,
            max_rows=max_rows,
            chunk_tokens=FLAGS.loss_chunk_tokens,
        )
        schedule = LinearWarmupLinearDecay(
            FLAGS.learning_rate, FLAGS.num_train_steps, FLAGS.num_warmup_steps
        )
        model.compile(commands.optimizer(schedule), **settings.compile_arguments())
    return model, config


def _student(packed) -> tuple[LanguageModel, dict]:
    """The student, and what decides the result of its training."""
    names = _DISTILLATION_FLAGS
    if FLAGS.init_checkpoint and FLAGS.init_checkpoint.endswith(".keras"):
        student = load_keras_file(
            FLAGS.init_checkpoint, FLAGS.head_layer, FLAGS.hidden_layer, packed
        )
        return student, {name: FLAGS[name].value for name in names}
    flags.follow_checkpoint()
    config = flags.model_config()
    student = new_model(FLAGS.task, config)
    if FLAGS.init_checkpoint:
        options = {
            "extend_positions": FLAGS.extend_positions,
            "ignore_mismatched": FLAGS.ignore_mismatched,
        }
        print(load_weights(student, FLAGS.init_checkpoint, **options))
    return student, commands.identity(config, (*commands.MODEL_FLAGS, *names))


def _teacher(packed) -> LanguageModel:
    if not FLAGS.teacher:
        raise ValueError("--mode=online needs --teacher.")
    if FLAGS.teacher.endswith(".keras"):
        return load_keras_file(FLAGS.teacher, FLAGS.head_layer, FLAGS.hidden_layer, packed)
    values = flag_values(FLAGS.teacher)
    if not values:
        raise ValueError(
            f"--teacher={FLAGS.teacher}: expected a directory with a config.json, that of a run or "
            "of Hugging Face's layout; bigbird-convert makes one of a 2021 checkpoint."
        )
    lengths = {name: FLAGS[name].value for name in ("max_encoder_length", "max_decoder_length")}
    config = BigBirdConfig.from_params({**values, **lengths, "pad_token_id": FLAGS.pad_id})
    return load_teacher(FLAGS.task, config, FLAGS.teacher)


def _check(cache, held_out, student):
    tokenizer = Tokenizer(find_vocabulary(FLAGS.vocab_model_file))
    options = {
        "tokenizer": tokenizer,
        "task": FLAGS.task,
        "label_share": FLAGS.label_share,
        "max_length": FLAGS.max_encoder_length,
    }
    check_cache(
        cache,
        student,
        k=FLAGS.k,
        temperature=FLAGS.temperature,
        tail=FLAGS.tail,
        state_weight=FLAGS.state_weight,
        **options,
    )
    if held_out is not None:
        check_cache(held_out, student, **options)
        check_held_out(cache, held_out)


def _identity(cache):
    names = ("vocab_size", "k", "temperatures", "alignment")
    identity = {name: cache.manifest["identity"].get(name) for name in ("teacher", "data")}
    return {**identity, **{name: cache.manifest[name] for name in names}}


def _count(student):
    return sum(variable.shape.num_elements() for variable in student.weights)


def run():
    """Entry of the installed command."""
    flags.run(main)


if __name__ == "__main__":
    run()
