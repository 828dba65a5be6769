"""Command: captures a teacher once into a cache, and checks, repairs, audits or imports one.

    bigbird-cache-teacher --task=masked_lm --init_checkpoint=runs/teacher --data_dir=builtin://documents
        --vocab_model_file=builtin --max_encoder_length=512 --k=100 --cache_dir=runs/cache

The model flags describe the teacher; a checkpoint with a `config.json` describes itself. A capture
that was stopped goes on behind its last finished shard. Its directory keeps its flags: to go on, to
`--repair` or to `--audit`, `--cache_dir` is enough; other flags that are given win.
"""

from __future__ import annotations

import glob
import json
import os
import pathlib
import sys
import time

from bigbird.core import flags
from bigbird.core.config import BigBirdConfig
from bigbird.core.data import open_source
from bigbird.core.pairs import PairEncoder
from bigbird.core.vocabulary import Tokenizer, find_vocabulary
from bigbird.distillation import import_arrays, sequences
from bigbird.distillation.cache import (
    TeacherCache,
    TeacherCacheWriter,
    finalize_cache,
    verify_cache,
)
from bigbird.distillation.cache_files import (
    FLAGS_FILE,
    CacheError,
    file_sha256,
    remedy,
    write_durably,
)
from bigbird.distillation.cache_format import LOGITS_DTYPES, OPTIONAL_FIELDS, RecordFormat
from bigbird.distillation.cache_writer import forget_shards
from bigbird.distillation.capture import audit, capture, plan_capture, tokens_to_capture
from bigbird.distillation.students import LanguageModel
from bigbird.distillation.toolkit_models import (
    ALIGNMENT_OF_TASK,
    TASKS,
    load_keras_file,
    load_teacher,
)
from bigbird.distillation.topk_teacher import TopKTeacher
from bigbird.pretrain.masking import WordMasker

FLAGS = flags.FLAGS

# Flags that say what to do with a cache; the others say what is captured, and are kept with it.
_ACTION_FLAGS = (
    "cache_dir",
    "num_shards",
    "shard_index",
    "finalize",
    "verify",
    "repair",
    "audit",
    "import",
)
# Flags that decide which sequences there are, by task.
_DATA_FLAGS = {
    "masked_lm": ("masked_lm_prob", "max_predictions_per_seq", "copies", "seed"),
    "seq2seq": ("max_decoder_length",),
    "next_token": ("split_documents", "pack"),
}

flags.DEFINE_string("cache_dir", None, "Directory of the cache.")
flags.DEFINE_enum("task", "masked_lm", list(TASKS), "What the teacher does.")
flags.DEFINE_string(
    "init_checkpoint",
    None,
    "The teacher: a checkpoint of any kind, or a .keras file that tf_keras or Keras 3 saved.",
)
flags.DEFINE_string("head_layer", None, "Layer of a .keras file that is its head; the last one.")
flags.DEFINE_string(
    "hidden_layer",
    None,
    "Layer of a .keras file that gives the hidden states; what its head reads.",
)
flags.DEFINE_string(
    "data_dir", "builtin://documents", "tfds://, builtin://, a directory or a file."
)
flags.DEFINE_string("split", "train", "Split of the data.")
flags.DEFINE_integer("max_encoder_length", 512, "Tokens of a sequence, at most.")
flags.DEFINE_integer("max_decoder_length", 128, "Tokens of a summary with its end, at most.")
flags.DEFINE_string("substitute_newline", None, "Text that stands for a newline.")
flags.DEFINE_bool(
    "split_documents",
    False,
    "Whether the rest of a long document makes further sequences, of task next_token.",
)
flags.DEFINE_bool(
    "pack",
    False,
    "Whether short sequences fill one up, of task next_token; models then read document_ids too.",
)
flags.DEFINE_integer("copies", 1, "Random windows of each document, of task masked_lm.")
flags.DEFINE_float("masked_lm_prob", 0.15, "Share of the words that is hidden.")
flags.DEFINE_integer("max_predictions_per_seq", 75, "Pieces to hide in a sequence, at most.")
flags.DEFINE_integer("k", 100, "Logits to keep of a token, the largest; 0 for all.")
flags.DEFINE_list("temperatures", ["1.0"], "Temperatures whose normalisers are stored.")
flags.DEFINE_bool("compact", False, "Whether ids are packed to the bits they need.")
flags.DEFINE_enum("logits_dtype", "bfloat16", list(LOGITS_DTYPES), "How logits are stored.")
flags.DEFINE_bool("with_states", False, "Whether to store the teacher's hidden states too.")
flags.DEFINE_integer("shard_sequences", 256, "Sequences of a shard.")
flags.DEFINE_integer("eval_batch_size", 8, "Sequences that the teacher reads at a time.")
flags.DEFINE_integer("chunk_tokens", None, "Tokens whose logits exist at a time, at most.")
flags.DEFINE_integer("num_shards", 1, "Workers that capture side by side.")
flags.DEFINE_integer("shard_index", 0, "Which of the workers this is.")
flags.DEFINE_bool("finalize", False, "Only joins what the workers captured.")
flags.DEFINE_bool("verify", False, "Only checks every byte, record and count.")
flags.DEFINE_bool("repair", False, "Checks, and captures bad and missing shards again.")
flags.DEFINE_integer(
    "audit", 0, "Only runs the teacher again, on this many sequences, and compares."
)
flags.DEFINE_list("import", [], "Only imports .npz or .parquet files (patterns): see the docs.")
flags.DEFINE_enum(
    "row_kind",
    "next",
    list(import_arrays.ROW_KINDS),
    "What a row of an imported file tells of: the next token, the token of a prompt as serving "
    "engines report it, or the token itself.",
)


def main(_):
    """Does what the flags ask."""
    if not FLAGS.cache_dir:
        raise ValueError("Give --cache_dir, the directory of the cache.")
    if FLAGS["import"].value:
        if FLAGS.repair or FLAGS.audit:
            raise ValueError(
                "--import reads arrays, with no teacher to --repair or --audit by: import them "
                "again into a new directory."
            )
        _import_files()
    elif FLAGS.finalize:
        _print_manifest(finalize_cache(FLAGS.cache_dir))
    elif FLAGS.verify:
        _verify()
    else:
        _capture_or_audit()


def _verify():
    report = verify_cache(FLAGS.cache_dir)
    print(report)
    if not report.ok:
        sys.exit(f"{FLAGS.cache_dir} is not sound. {remedy(FLAGS.cache_dir)}")


def _capture_or_audit():
    path = pathlib.Path(FLAGS.cache_dir, FLAGS_FILE)
    _take_flags_of_capture(path)
    if not FLAGS.init_checkpoint:
        raise ValueError("Give --init_checkpoint, the teacher.")
    model, config = _teacher()
    tokenizer = Tokenizer(find_vocabulary(FLAGS.vocab_model_file))
    data = _sequences(tokenizer)
    plan = plan_capture(data)
    layout = _layout(model, data)
    teacher = TopKTeacher(
        model,
        layout,
        batch_size=FLAGS.eval_batch_size,
        max_length=max(plan.max_length, 1),
        pad_id=FLAGS.pad_id,
        chunk_tokens=FLAGS.chunk_tokens,
        jit_compile=FLAGS.jit_compile,
    )
    if FLAGS.audit:
        print(audit(teacher, data, plan, TeacherCache(FLAGS.cache_dir), FLAGS.audit))
        return
    if FLAGS.repair:
        report = verify_cache(FLAGS.cache_dir)
        print(report)
        forget_shards(FLAGS.cache_dir, report.bad_shards)
    writer = TeacherCacheWriter(
        FLAGS.cache_dir,
        **layout.to_json(),
        identity=_identity(model, config, tokenizer, plan),
        shard_sequences=FLAGS.shard_sequences,
        expected_sequences=len(plan),
        alignment=ALIGNMENT_OF_TASK[FLAGS.task],
        pad_id=FLAGS.pad_id,
        num_shards=FLAGS.num_shards,
        shard_index=FLAGS.shard_index,
    )
    with writer:
        write_durably(path, json.dumps(_capture_flags(), indent=1, sort_keys=True), alone=False)
        left = tokens_to_capture(plan, writer)
        _print_plan(plan, left)
        progress = Progress(left)
        capture(teacher, data, plan, writer, progress.add)
    if left:
        progress.close()
    if FLAGS.num_shards > 1:
        print(
            "When every worker is done, run bigbird-cache-teacher "
            f"--cache_dir={FLAGS.cache_dir} --finalize."
        )
    else:
        _print_manifest(TeacherCache(FLAGS.cache_dir).manifest)


def _capture_flags():
    return {name: value for name, value in flags.given().items() if name not in _ACTION_FLAGS}


def _take_flags_of_capture(path):
    """Sets the flags that the command line left open to those that a capture was started with."""
    if not path.exists():
        return
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise CacheError(f"{path} is damaged ({error}). Delete it and give all flags.") from error
    # Not `flags.adopt`, which leaves them open: what the teacher's checkpoint says would win later.
    for name, value in values.items():
        if name in FLAGS and FLAGS[name].using_default_value:
            setattr(FLAGS, name, value)


def _teacher() -> tuple[LanguageModel, BigBirdConfig | None]:
    if FLAGS.init_checkpoint.endswith(".keras"):
        return load_keras_file(
            FLAGS.init_checkpoint, FLAGS.head_layer, FLAGS.hidden_layer, FLAGS.pack
        ), None
    flags.follow_checkpoint()
    config = flags.model_config()
    return load_teacher(FLAGS.task, config, FLAGS.init_checkpoint), config


def _sequences(tokenizer: Tokenizer):
    special = flags.special_tokens()
    fields = ("document", "summary") if FLAGS.task == "seq2seq" else ("text",)
    source = open_source(FLAGS.data_dir, FLAGS.split, fields, FLAGS.tfds_data_dir)
    if FLAGS.task == "seq2seq":
        encoder = PairEncoder(
            tokenizer,
            special,
            FLAGS.max_encoder_length,
            FLAGS.max_decoder_length,
            FLAGS.substitute_newline,
        )
        return sequences.pair_sequences(source, encoder)
    if FLAGS.task == "masked_lm":
        masker = WordMasker(
            tokenizer,
            special,
            FLAGS.max_encoder_length,
            FLAGS.max_predictions_per_seq,
            FLAGS.masked_lm_prob,
            FLAGS.substitute_newline,
        )
        return sequences.masked_sequences(source, masker, copies=FLAGS.copies, seed=FLAGS.seed)
    windows = sequences.document_windows(
        source,
        tokenizer,
        special,
        FLAGS.max_encoder_length,
        substitute_newline=FLAGS.substitute_newline,
        split_documents=FLAGS.split_documents,
    )
    singles = sequences.next_token_sequences(windows)
    if FLAGS.pack:
        return sequences.packed_sequences(singles, FLAGS.max_encoder_length)
    return singles


def _layout(model: LanguageModel, data) -> RecordFormat:
    fields = [name for name in OPTIONAL_FIELDS if name in data.element_spec]
    return RecordFormat(
        vocab_size=model.vocab_size,
        k=FLAGS.k or model.vocab_size,
        temperatures=tuple(map(float, FLAGS.temperatures)),
        compact=FLAGS.compact,
        logits_dtype=FLAGS.logits_dtype,
        fields=(*fields, "states") if FLAGS.with_states else tuple(fields),
        state_width=model.width if FLAGS.with_states else None,
    )


def _identity(model, config, tokenizer, plan):
    """What the cache is of; where data and teacher lie may change."""
    names = ("task", "split", "max_encoder_length", "substitute_newline", *_DATA_FLAGS[FLAGS.task])
    head = model.head()
    return {
        "teacher": {
            "fingerprint": model.fingerprint(),
            "config": config.to_dict() if config else None,
            "logit_scale": head.logit_scale,
            "logit_softcap": head.logit_softcap,
        },
        "tokenizer": _tokenizer_identity(tokenizer),
        "data": {"fingerprint": plan.fingerprint, **{name: FLAGS[name].value for name in names}},
    }


def _tokenizer_identity(tokenizer):
    return {"fingerprint": tokenizer.fingerprint(), "pieces": tokenizer.vocab_size}


def _import_files():
    paths = [path for pattern in FLAGS["import"].value for path in sorted(glob.glob(pattern))]
    if not paths:
        raise ValueError(f"--import={FLAGS['import'].value}: there is no such file.")
    tokenizer = Tokenizer(find_vocabulary(FLAGS.vocab_model_file))
    first = next(import_arrays.read_arrays(paths[0]))
    vocab_size = FLAGS.vocab_size or tokenizer.vocab_size
    files = {os.path.basename(path): file_sha256(path) for path in paths}
    writer = TeacherCacheWriter(
        FLAGS.cache_dir,
        vocab_size=vocab_size,
        k=FLAGS.k,
        temperatures=(1.0,) if import_arrays.has_normaliser(first) else (),
        compact=FLAGS.compact,
        logits_dtype=FLAGS.logits_dtype,
        identity={
            "teacher": {"imported": files},
            "tokenizer": _tokenizer_identity(tokenizer),
            "data": {"task": "masked_lm" if FLAGS.row_kind == "same" else "next_token"},
        },
        shard_sequences=FLAGS.shard_sequences,
        alignment="same" if FLAGS.row_kind == "same" else "next",
        pad_id=FLAGS.pad_id,
    )
    with writer:
        for path in paths:
            for arrays in import_arrays.read_arrays(path):
                record = import_arrays.record_of(arrays, vocab_size, FLAGS.k, FLAGS.row_kind)
                writer.write(record.key, record.input_ids, record.targets, record.mask)
    _print_manifest(TeacherCache(FLAGS.cache_dir).manifest)


def _print_plan(plan, left):
    print(f"{len(plan):,} sequences with {plan.tokens.sum():,} tokens; {left:,} are to capture.")
    if plan.repeated or plan.empty:
        print(
            f"Left out: {plan.repeated:,} that are there twice, {plan.empty:,} in which no token "
            "takes part."
        )


def _print_manifest(manifest):
    tokens = max(manifest["tokens"], 1)
    print(
        f"{FLAGS.cache_dir}: {manifest['sequences']:,} sequences, {manifest['tokens']:,} tokens, "
        f"{manifest['bytes'] / 2**20:,.1f} MiB, {manifest['bytes'] / tokens:,.0f} bytes a token."
    )


class Progress:
    """Tokens per second and the time left: one line on a terminal, a line a minute elsewhere."""

    def __init__(self, total: int):
        self._total, self._done = total, 0
        self._start = time.monotonic()
        self._shown = self._start
        self._is_terminal = sys.stdout.isatty()

    def add(self, record) -> None:
        """Counts the tokens of a record that was written."""
        self._done += int(record.mask.sum())
        now = time.monotonic()
        if now - self._shown >= (1 if self._is_terminal else 60):
            self._shown = now
            self._show()

    def close(self) -> None:
        """Shows the end."""
        self._show()
        if self._is_terminal:
            print()

    def _show(self):
        seconds = max(time.monotonic() - self._start, 1e-6)
        speed = self._done / seconds
        left = (self._total - self._done) / speed if speed else 0
        share = self._done / max(self._total, 1)
        bar = "█" * int(20 * share) + "░" * (20 - int(20 * share))
        text = (
            f"{bar} {share:4.0%}  {self._done:,} of {self._total:,} tokens, {speed:,.0f} a second, "
            f"{int(left // 3600)}:{int(left % 3600 // 60):02}:{int(left % 60):02} left"
        )
        print(f"\r{text} " if self._is_terminal else text, end="" if self._is_terminal else "\n")
        sys.stdout.flush()


def run():
    """Entry of the installed command."""
    flags.run(main)


if __name__ == "__main__":
    run()
