"""The distillation trainer: a tf_keras model that learns a teacher's distribution at every token.

Axis letters: B batch, L length, R rows (tokens that take part), D model, V vocabulary, K kept.

    cache = TeacherCache("cache")
    check_cache(cache, student, tokenizer=tokenizer)
    model = Distiller(student, cache.format.vocab_size, max_rows=cache.manifest["max_rows"])
    model.compile(optimizer, run_seed=0)
    model.fit(cache.dataset(batch_size=8), steps_per_epoch=1000)

Under `training.train` it resumes exactly, accumulates gradients and keeps its best weights, as any
`SeededModel` does.
"""

from __future__ import annotations

import tensorflow as tf
import tf_keras as keras

from bigbird.core import training
from bigbird.core.callbacks import differences
from bigbird.core.vocabulary import Tokenizer
from bigbird.distillation.cache_files import CacheError
from bigbird.distillation.cache_format import ALIGNMENTS
from bigbird.distillation.cache_reader import TeacherCache
from bigbird.distillation.divergence import TAILS
from bigbird.distillation.losses import topk_kl
from bigbird.distillation.students import LanguageModel
from bigbird.distillation.targets import (
    TeacherLogits,
    TopKTargets,
    require_choice,
    require_positive,
)

# Where the targets come from, and the implementation of the loss.
MODES = {
    "online": "fused",
    "offline_dense": "dense",
    "offline_forward_chunked": "forward_chunked",
    "offline_fused": "fused",
}


_MEANS = ("loss", "kl", "argmax_agreement", "student_kept_mass", "kept_mass", "cross_entropy")


class Distiller(training.SeededModel):
    r"""A student that learns from its teacher's cached top-K logits, or from the teacher itself.

    loss = (1 - α) T² KL(p || q) + α CE(q, labels) + β mean((P h - s)²)

    with KL by the tail rule, α the `label_share`, β the `state_weight`, h the student's hidden
    states, s the teacher's, and P a projection where their widths differ. Every number is a mean
    over the tokens of a replica that take part.

    Batches are dicts as `TeacherCache.dataset` gives them; `online`, they need `input_ids`, `mask`
    and what the student and teacher read besides. Training shows `loss` and `kept_mass`, the
    teacher's mass on the kept ids.

    Evaluation gives `kl`, the divergence from the teacher at temperature 1: from the full teacher
    where the batches keep all its logits, or `online`; otherwise by `bucket`, which is never above
    it, or by `renormalize` where the cache has no normaliser at temperature 1. Besides, the share
    of tokens where both rank the same id first, the student's mass on the kept ids, and the cross
    entropy of the labels where there are any.

    Source: "Efficient Knowledge Distillation for LLMs", arXiv:2608.03796.
    """

    def __init__(
        self,
        student: LanguageModel,
        teacher_vocab_size: int,
        *,
        mode: str = "offline_fused",
        teacher: LanguageModel | None = None,
        temperature: float = 1.0,
        tail: str = "bucket",
        label_share: float = 0.0,
        alignment: str = "same",
        state_weight: float = 0.0,
        state_width: int | None = None,
        max_rows: int | None = None,
        chunk_tokens: int | None = None,
        memory_budget_bytes: int | None = None,
        **kwargs,
    ):
        """Creates the trainer of a student that is built.

        Args:
          student: see `students.LanguageModel`.
          teacher_vocab_size: V of the teacher's head.
          mode: `online` runs `teacher`; `offline_dense`, `offline_forward_chunked` and
            `offline_fused` read cached targets, and differ in memory and time only.
          teacher: of mode `online`; it is not trained, and not saved with the student.
          temperature: T.
          tail: what the loss makes of the ids that are not kept; see `topk_kl`.
          label_share: α in [0, 1]; 1 trains on hard labels only.
          alignment: whether row t tells of token t, `same`, or of the next, `next`; where labels
            are not given, this says which token is one.
          state_weight: β; above 0, batches need `states`.
          state_width: D of the teacher's hidden states.
          max_rows: most tokens of a sequence that take part. The head then sees these alone, which
            matters where few words are hidden. None: all tokens.
          chunk_tokens, memory_budget_bytes: as in `topk_kl`.

        Raises:
          ValueError: for an argument outside its range, or one that another asks for.
        """
        super().__init__(**kwargs)
        require_choice("mode", mode, tuple(MODES))
        require_choice("tail", tail, TAILS)
        require_choice("alignment", alignment, ALIGNMENTS)
        require_positive("temperature", temperature)
        if (mode == "online") != (teacher is not None):
            raise ValueError(
                f"mode={mode!r} with teacher={teacher}: online needs the teacher, and the offline "
                "modes must not hold it in memory."
            )
        if not 0.0 <= label_share <= 1.0 or state_weight < 0.0:
            raise ValueError(
                "Expected label_share in [0, 1] and state_weight of at least 0; received "
                f"label_share={label_share}, state_weight={state_weight}."
            )
        if state_weight and state_width is None:
            raise ValueError("state_weight needs state_width, the D of the teacher's states.")
        self.student = student
        # Where this model and its checkpoints find the weights; of Keras 3, as plain variables.
        is_ours = all(isinstance(module, keras.layers.Layer) for module in student.modules)
        self.student_modules = list(student.modules) if is_ours else []
        self.student_weights = [] if is_ours else student.weights
        self._teacher = teacher
        self.teacher_vocab_size = teacher_vocab_size
        self.mode, self.temperature, self.tail = mode, temperature, tail
        self.label_share, self.state_weight = label_share, state_weight
        self.alignment, self.max_rows = alignment, max_rows
        self._loss_options = {
            "chunk_tokens": chunk_tokens,
            "memory_budget_bytes": memory_budget_bytes,
        }
        self.state_projection = None
        if state_weight and state_width != student.width:
            self.state_projection = keras.layers.Dense(state_width, name="state_projection")
            self.state_projection.build([None, student.width])
        self._means = {name: keras.metrics.Mean(name=name) for name in _MEANS}
        self._updated = ()
        self.built = True

    def call(self, features, training=None):
        """A batch -> the student's hidden states `[B, L, D]`."""
        return self.student.hidden_states(features, training)

    def batch_loss(self, features):
        """The loss of a batch: float32 `[]`."""
        return self.compute_loss(features, y_pred=self(features, training=True))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        """The loss of a batch `x` with the student's hidden states `y_pred`: float32 `[]`."""
        del y, sample_weight
        rows = self._rows(x, y_pred)
        tokens = tf.reduce_sum(tf.cast(rows["mask"], tf.float32))
        targets = self._targets(rows, self.temperature)
        loss = self._divergence(rows, targets)
        if self.state_weight:
            loss += self.state_weight * self._state_loss(rows)
        found = {"loss": loss}
        if self.mode != "online" and targets.carries_mass_at(self.temperature):
            mass = tf.where(rows["mask"], tf.exp(targets.log_mass()), 0.0)
            found["kept_mass"] = tf.math.divide_no_nan(tf.reduce_sum(mass), tokens)
        self._update(found, tokens)
        # The gradients of the replicas are added up.
        return loss / tf.distribute.get_strategy().num_replicas_in_sync

    def loss_weight(self, data):
        """Returns the number of tokens that take part."""
        features, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return tf.reduce_sum(tf.cast(features["mask"], tf.float32))

    def test_step(self, data):
        """Compares the student with its teacher; see the class."""
        features, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        with training.inference_context():
            rows = self._rows(features, self(features, training=False))
        tokens = tf.reduce_sum(tf.cast(rows["mask"], tf.float32))
        targets = self._targets(rows, temperature=1.0)
        keeps_all = self.mode == "online" or targets.kept == self.teacher_vocab_size
        by_bucket = not keeps_all and targets.carries_mass_at(1.0)
        kl, found = self._topk_kl(
            rows, targets, tail="bucket" if by_bucket else "renormalize", return_diagnostics=True
        )
        found["kl"] = kl
        if "labels" in rows:
            found["cross_entropy"] = self._label_loss(rows)
        self._update(found, tokens)
        return self.get_metrics_result()

    @property
    def metrics(self):
        return list(self._means.values())

    def get_metrics_result(self):
        """Returns the means that the step in hand has updated."""
        return {name: self._means[name].result() for name in self._updated}

    def _update(self, found, tokens):
        """Adds values, each a mean over `tokens`. Which ones there are is known at tracing."""
        self._updated = tuple(name for name in _MEANS if name in found)
        for name in self._updated:
            self._means[name].update_state(found[name], tokens)

    def _rows(self, features, hidden):
        """What the loss needs of the tokens that take part, `[B, R, …]`."""
        names = ("mask", "ids", "logits", "count", "log_z", "states")
        rows = {name: features[name] for name in names if name in features}
        rows["hidden"] = hidden
        labels = self._labels(features)
        if labels is not None:
            rows["labels"] = tf.where(features["mask"], labels, -1)
        if self.mode == "online":
            rows["teacher"] = self._teacher.hidden_states(features, False)
        length = features["mask"].shape[1]
        if self.max_rows is None or (length is not None and length <= self.max_rows):
            return rows
        tf.debugging.assert_less_equal(
            tf.math.count_nonzero(features["mask"], axis=1),
            tf.constant(self.max_rows, tf.int64),
            "More tokens of a sequence take part than max_rows says: raise it, or leave it out.",
        )
        # The first places of the tokens that take part, then others without weight.
        count = tf.minimum(self.max_rows, tf.shape(features["mask"])[1])
        _, places = tf.math.top_k(tf.cast(features["mask"], tf.int32), count)
        return {name: tf.gather(value, places, batch_dims=1) for name, value in rows.items()}

    def _labels(self, features):
        """Hard labels `[B, L]`, or None where there are none."""
        if "labels" in features:
            return features["labels"]
        if "target_ids" in features:
            return features["target_ids"]
        if self.alignment == "next":
            ids = features["input_ids"]
            return tf.pad(ids[:, 1:], [[0, 0], [0, 1]], constant_values=-1)
        return None

    def _targets(self, rows, temperature):
        if self.mode == "online":
            return TeacherLogits(self._teacher.head().logits(rows["teacher"]))
        return TopKTargets(
            rows["ids"],
            rows["logits"],
            rows.get("log_z"),
            self.teacher_vocab_size,
            rows["count"],
            temperature,
        )

    def _divergence(self, rows, targets):
        """(1 - α) T² KL + α CE, a mean over tokens."""
        share = self.label_share
        if share == 1.0:
            return self._label_loss(rows)
        labels = {"labels": rows["labels"], "label_weight": share / (1 - share)} if share else {}
        options = {"temperature": self.temperature, "tail": self.tail}
        return (1 - share) * self._topk_kl(rows, targets, **options, **labels)

    def _topk_kl(self, rows, targets, **options):
        head = self.student.head()
        return topk_kl(
            rows["hidden"],
            head.kernel,
            targets,
            bias=head.bias,
            sample_weight=rows["mask"],
            implementation=MODES[self.mode],
            logit_scale=head.logit_scale,
            logit_softcap=head.logit_softcap,
            **self._loss_options,
            **options,
        )

    def _label_loss(self, rows):
        """The mean cross entropy of the labels: a teacher that keeps nothing says nothing."""
        nothing = tf.zeros_like(rows["mask"], tf.int32)
        targets = TopKTargets(
            nothing[..., tf.newaxis],
            tf.zeros_like(nothing, tf.float32)[..., tf.newaxis],
            None,
            self.teacher_vocab_size,
            count=nothing,
        )
        return self._topk_kl(rows, targets, labels=rows["labels"], label_weight=1.0)

    def _state_loss(self, rows):
        """The mean squared distance of hidden states from the teacher's."""
        states = rows["teacher"] if self.mode == "online" else rows["states"]
        hidden = rows["hidden"]
        if self.state_projection is not None:
            hidden = self.state_projection(hidden)
        difference = tf.cast(hidden, tf.float32) - tf.cast(states, tf.float32)
        mask = tf.cast(rows["mask"], tf.float32)
        distances = tf.reduce_mean(tf.square(difference), axis=-1)
        return tf.math.divide_no_nan(tf.reduce_sum(distances * mask), tf.reduce_sum(mask))


def check_cache(
    cache: TeacherCache,
    student: LanguageModel,
    *,
    tokenizer: Tokenizer | None = None,
    task: str | None = None,
    k: int | None = None,
    temperature: float = 1.0,
    tail: str = "bucket",
    label_share: float = 0.0,
    state_weight: float = 0.0,
    max_length: int | None = None,
) -> None:
    """Refuses a cache that a student cannot learn from.

    Args:
      cache: of the teacher.
      student: see `students.LanguageModel`.
      tokenizer: the student's. It may have further pieces behind the teacher's.
      task: what the student does, as the capture's `--task`.
      k: entries to read; all where None.
      temperature, tail, label_share, state_weight: as for `Distiller`.
      max_length: longest input that the student takes.

    Raises:
      CacheError: naming both sides.
    """
    manifest, identity = cache.manifest, cache.manifest["identity"]
    there = identity.get("tokenizer", {})
    pieces = there.get("pieces", 0)
    captured = identity.get("data", {}).get("task")
    stored = ", ".join(f"{t:g}" for t in cache.format.temperatures) or "no temperature"
    own_pieces = tokenizer.vocab_size if tokenizer else 0
    is_other_tokenizer = tokenizer is not None and (
        tokenizer.vocab_size < pieces or tokenizer.fingerprint(pieces) != there.get("fingerprint")
    )
    faults = {
        f"tokenizer: the student's {own_pieces} pieces do not begin with the {pieces} of the "
        f"teacher's (fingerprint {there.get('fingerprint')}). Give the --vocab_model_file of the "
        "capture": is_other_tokenizer,
        f"vocabulary: the teacher's tokenizer has {pieces} pieces, the student's head "
        f"{student.vocab_size} words. Make it as large": student.vocab_size < pieces,
        f"task: the cache is of {captured}, the student's is {task}": task not in (None, captured),
        f"k: {cache.format.k} entries are kept there, {k} are wanted. Take no more, or capture "
        f"with --k={k}": (k or 0) > cache.format.k,
        f"temperature: normalisers are stored at {stored}; tail={tail!r} wants one at "
        f"{temperature:g}. Capture with --temperatures={temperature:g}, or take "
        "tail='renormalize'": tail != "renormalize"
        and temperature not in cache.format.temperatures,
        f"states: state_weight={state_weight} needs the teacher's hidden states; the cache has "
        f"the fields {cache.format.fields}. Capture with --with_states": bool(state_weight)
        and "states" not in cache.format.fields,
        f"labels: label_share={label_share} needs hard labels, and the cache has none": bool(
            label_share
        )
        and manifest["alignment"] == "same"
        and not {"labels", "target_ids"} & set(cache.format.fields),
        f"length: inputs have up to {manifest['max_input_length']} tokens there, the student "
        f"takes {max_length}": max_length is not None and manifest["max_input_length"] > max_length,
    }
    found = [explanation for explanation, is_fault in faults.items() if is_fault]
    if found:
        raise CacheError(f"The cache {cache.directory} does not fit: {'; '.join(found)}.")


def check_held_out(cache: TeacherCache, held_out: TeacherCache) -> None:
    """Refuses held-out sequences that are also trained on, or are of another teacher.

    Raises:
      CacheError: naming both sides.
    """
    shared = sum(key in cache for key in held_out.keys)
    if shared:
        raise CacheError(
            f"{shared} of the {len(held_out)} sequences of {held_out.directory} are also in "
            f"{cache.directory}, which is trained on: capture another split."
        )
    teachers = [c.manifest["identity"].get("teacher") for c in (cache, held_out)]
    if teachers[0] != teachers[1]:
        found = differences(teachers[0] or {}, teachers[1] or {})
        raise CacheError(
            f"{cache.directory} and {held_out.directory} are of different teachers ({found})."
        )
