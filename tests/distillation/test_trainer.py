"""Claims about the distillation trainer: one loss in four modes, by tokens, resumed exactly."""

import importlib

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from bigbird.core import training
from bigbird.core.recompute_grad import RecomputingDropout
from bigbird.core.vocabulary import Tokenizer
from bigbird.distillation.cache import CacheError, TeacherCache, TeacherCacheWriter
from bigbird.distillation.cache_format import RecordFormat
from bigbird.distillation.capture import capture, plan_capture
from bigbird.distillation.students import functional_model
from bigbird.distillation.topk_teacher import TopKTeacher
from bigbird.distillation.trainer import MODES, Distiller, check_cache, check_held_out

VOCAB_SIZE, WIDTH, LENGTH = 30, 6, 8
OFFLINE = [mode for mode in MODES if mode != "online"]


def sequences(seeds):
    for seed in seeds:
        rng = np.random.default_rng(seed)
        ids = rng.integers(1, VOCAB_SIZE, size=3 + seed % 6).astype(np.int32)
        mask = np.arange(len(ids)) % 2 == 1
        yield {"input_ids": ids, "mask": mask, "labels": np.where(mask, ids // 2, -1)}


def data(seeds):
    signature = {
        "input_ids": tf.TensorSpec([None], tf.int32),
        "mask": tf.TensorSpec([None], bool),
        "labels": tf.TensorSpec([None], tf.int64),
    }
    return tf.data.Dataset.from_generator(lambda: sequences(seeds), output_signature=signature)


def new_model(seed, width=WIDTH, library=tf_keras, dropout=0.0):
    library.utils.set_random_seed(seed)
    ids = library.Input([None], dtype="int32")
    hidden = library.layers.Embedding(VOCAB_SIZE, width)(ids)
    hidden = library.layers.Dense(width, "tanh")(hidden)
    if dropout:
        hidden = RecomputingDropout(dropout)(hidden)
    scale = library.initializers.RandomNormal(stddev=1.0)
    return functional_model(
        library.Model(ids, library.layers.Dense(VOCAB_SIZE, kernel_initializer=scale)(hidden))
    )


@pytest.fixture(scope="module")
def teacher():
    return new_model(7, width=10)


def capture_into(directory, teacher, seeds, k=5, temperatures=(1.0, 2.0), **changes):
    settings = {"fields": ("labels", "states"), "state_width": 10, "logits_dtype": "float32"}
    layout = RecordFormat(VOCAB_SIZE, k, temperatures, **{**settings, **changes})
    source = data(seeds)
    identity = {"teacher": {"fingerprint": teacher.fingerprint()}, "data": {"task": "masked_lm"}}
    identity["tokenizer"] = {"pieces": 0, "fingerprint": ""}
    with TeacherCacheWriter(directory, **layout.to_json(), identity=identity) as writer:
        reader = TopKTeacher(teacher, layout, batch_size=4, max_length=LENGTH)
        capture(reader, source, plan_capture(source), writer)
    return TeacherCache(directory)


@pytest.fixture(scope="module")
def cache(tmp_path_factory, teacher):
    return capture_into(tmp_path_factory.mktemp("cache"), teacher, range(24))


@pytest.fixture(scope="module")
def full_cache(tmp_path_factory, teacher):
    """All logits of the training sequences."""
    return capture_into(tmp_path_factory.mktemp("full"), teacher, range(24), k=VOCAB_SIZE)


def new_distiller(cache, student=None, accumulation=1, jit_compile=False, **options):
    options = {"max_rows": cache.manifest["max_rows"], **options}
    model = Distiller(student or new_model(1), VOCAB_SIZE, **options)
    optimizer = tf_keras.optimizers.SGD(0.5)
    model.compile(
        optimizer,
        run_seed=0,
        gradient_accumulation_steps=accumulation,
        jit_compile=jit_compile,
    )
    return model


def loss_of(model, batch):
    return model.train_on_batch(batch, return_dict=True)["loss"]


def losses_of(model, cache, steps=4, **reading):
    batches = cache.dataset(8, seed=0, **reading)
    history = []
    for batch in batches.take(steps):
        model.reset_metrics()
        history.append(loss_of(model, batch))
    return history


# ------------------------------------------------------------------------------- modes


def test_the_offline_modes_make_the_same_steps(cache):
    losses = {mode: losses_of(new_distiller(cache, mode=mode), cache) for mode in OFFLINE}
    for mode in OFFLINE[1:]:
        # The modes add up in different orders.
        np.testing.assert_allclose(losses[mode], losses[OFFLINE[0]], rtol=1e-4)
    assert losses[OFFLINE[0]][-1] < losses[OFFLINE[0]][0]


def test_online_equals_a_cache_of_all_logits(full_cache, teacher):
    online = new_distiller(full_cache, mode="online", teacher=teacher)
    offline = new_distiller(full_cache)
    np.testing.assert_allclose(
        losses_of(online, full_cache), losses_of(offline, full_cache), rtol=1e-4
    )


def test_a_student_of_the_teachers_weights_has_nothing_to_learn(full_cache):
    model = new_distiller(full_cache, student=new_model(7, width=10))
    assert abs(losses_of(model, full_cache, 1)[0]) < 1e-5


def test_the_head_sees_only_tokens_that_take_part_and_nothing_changes(cache):
    few = losses_of(new_distiller(cache), cache)
    assert cache.manifest["max_rows"] < cache.manifest["max_length"]
    np.testing.assert_allclose(
        few, losses_of(new_distiller(cache, max_rows=None), cache), rtol=1e-5
    )


def test_batches_may_be_shorter_than_the_most_rows_of_the_cache(cache):
    longest = cache.manifest["max_length"]
    few = losses_of(new_distiller(cache, max_rows=longest), cache, pad_to_batch=True)
    np.testing.assert_allclose(few, losses_of(new_distiller(cache), cache), rtol=1e-5)


def test_a_token_that_the_head_would_not_see_is_an_error(cache):
    model = new_distiller(cache, max_rows=1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="raise it, or leave it out"):
        losses_of(model, cache, 1)


def test_a_compiled_step_is_the_same_step(cache):
    plain, compiled = (new_distiller(cache, jit_compile=jit) for jit in (False, True))
    # The loss is a difference of numbers of order one.
    np.testing.assert_allclose(losses_of(compiled, cache, 2), losses_of(plain, cache, 2), atol=1e-7)


def test_a_keras_3_student_takes_the_same_steps_as_a_tf_keras_one(cache):
    student = new_model(1, library=importlib.import_module("keras"))
    twin = new_model(1)
    for ours, theirs in zip(twin.weights, student.weights, strict=True):
        ours.assign(theirs)
    model = new_distiller(cache, student=student)
    assert len(model.trainable_variables) == 5
    np.testing.assert_allclose(
        losses_of(model, cache), losses_of(new_distiller(cache, student=twin), cache), rtol=1e-5
    )


# ------------------------------------------------------------------------- parts of the loss


def test_labels_alone_give_their_cross_entropy(cache):
    student = new_model(1)
    model = new_distiller(cache, student=student, label_share=1.0)
    (batch,) = cache.dataset(24, training=False)
    logits = student.head().logits(student.hidden_states(batch, False))
    picked = tf.gather(tf.nn.log_softmax(logits), tf.maximum(batch["labels"], 0), batch_dims=2)
    expected = -np.mean(picked.numpy()[batch["mask"].numpy()])
    assert loss_of(model, batch) == pytest.approx(expected, rel=1e-5)


def test_the_label_share_mixes_the_two_losses(cache):
    (batch,) = cache.dataset(24, training=False)
    none, some, all_ = (
        loss_of(new_distiller(cache, label_share=share), batch) for share in (0.0, 0.25, 1.0)
    )
    assert some == pytest.approx(0.75 * none + 0.25 * all_, rel=1e-5)


def test_next_tokens_are_labels_where_none_are_given(cache, teacher):
    student = new_model(1)
    model = Distiller(student, VOCAB_SIZE, alignment="next", label_share=0.5)
    (batch,) = cache.dataset(24, training=False)
    labels = model._labels({"input_ids": batch["input_ids"]}).numpy()
    np.testing.assert_array_equal(labels[:, :-1], batch["input_ids"][:, 1:])
    assert (labels[:, -1] == -1).all()


def test_hidden_states_are_compared_through_a_projection_that_learns(cache):
    (batch,) = cache.dataset(24, training=False)
    model = new_distiller(cache, label_share=1.0, state_weight=1.0, state_width=10)
    assert model.state_projection.kernel.shape == [WIDTH, 10]
    projection = model.state_projection.kernel.numpy()
    hidden = new_model(1).hidden_states(batch, False)
    squares = np.mean((hidden @ projection - batch["states"]) ** 2, axis=-1)
    distance = squares[batch["mask"].numpy()].mean()
    without = loss_of(new_distiller(cache, label_share=1.0), batch)
    assert loss_of(model, batch) == pytest.approx(without + distance, rel=1e-5)
    assert not np.array_equal(projection, model.state_projection.kernel.numpy())


@pytest.mark.parametrize("tail", ["zero", "bucket", "uniform"])
def test_another_temperature_and_tail_go_through_to_the_loss(cache, tail):
    model = new_distiller(cache, temperature=2.0, tail=tail)
    assert np.isfinite(losses_of(model, cache, 1, temperature=2.0)).all()
    with pytest.raises(ValueError, match="log_z at temperature 2"):
        losses_of(new_distiller(cache, temperature=2.0, tail=tail), cache, 1, temperature=3.0)


# -------------------------------------------------------------------------------- counting


def test_accumulation_by_tokens_equals_the_large_batch(cache):
    whole, parts = new_distiller(cache), new_distiller(cache, accumulation=4)
    batches = list(cache.dataset(8, seed=0).take(2))
    counts = [np.sum(batch["mask"], axis=1) for batch in batches]
    assert len({tuple(count.reshape(4, 2).sum(1)) for count in counts}) > 1
    for batch in batches:
        whole.train_on_batch(batch)
        parts.train_on_batch(batch)
    for one, other in zip(whole.trainable_variables, parts.trainable_variables, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_what_tokens_without_weight_hold_does_not_matter(cache):
    (batch,) = cache.dataset(24, training=False)
    mask = batch["mask"][..., tf.newaxis]
    noise = {
        "ids": tf.where(mask, batch["ids"], 10**6),
        "logits": tf.where(mask, tf.cast(batch["logits"], tf.float32), np.nan),
        "log_z": tf.where(batch["mask"], batch["log_z"], np.inf),
        "labels": tf.where(batch["mask"], batch["labels"], 10**6),
    }
    model, other = (new_distiller(cache, label_share=0.5) for _ in range(2))
    assert loss_of(model, batch) == loss_of(other, batch | noise)


def test_evaluation_is_the_training_loss_on_the_same_batch(cache):
    model = new_distiller(cache, tail="bucket")
    (batch,) = cache.dataset(24, training=False)
    scores = model.test_on_batch(batch, return_dict=True)
    model.reset_metrics()
    assert scores["kl"] == pytest.approx(loss_of(model, batch), rel=1e-5)
    assert set(scores) == {
        "kl",
        "argmax_agreement",
        "student_kept_mass",
        "kept_mass",
        "cross_entropy",
    }


def test_evaluation_over_batches_is_the_mean_over_tokens(cache):
    model = new_distiller(cache)
    one = model.evaluate(cache.dataset(24, training=False), return_dict=True, verbose=0)
    many = model.evaluate(cache.dataset(5, training=False), return_dict=True, verbose=0)
    for name, value in one.items():
        assert many[name] == pytest.approx(value, rel=1e-5), name


def test_the_divergence_of_kept_ids_is_never_above_that_of_all(cache, full_cache, teacher):
    def evaluate(targets, **options):
        batches = targets.dataset(8, training=False)
        return new_distiller(targets, **options).evaluate(batches, return_dict=True, verbose=0)

    kept, full = evaluate(cache), evaluate(full_cache)
    again = evaluate(cache, mode="online", teacher=teacher)
    assert kept["kl"] < full["kl"]
    assert again["kl"] == pytest.approx(full["kl"], rel=1e-4)
    assert full["kept_mass"] == pytest.approx(1.0, abs=1e-5)


# ------------------------------------------------------------------------------------- runs


def run(directory, cache, steps, monkeypatch=None, stop_at=None):
    settings = training.TrainingSettings(
        str(directory), steps, 8, save_checkpoints_steps=2, log_steps=1, best_metric="kl"
    )
    model = Distiller(new_model(1, dropout=0.3), VOCAB_SIZE)
    model.compile(tf_keras.optimizers.Adam(0.01), **settings.compile_arguments())

    class Stop(tf_keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations) == stop_at:
                raise KeyboardInterrupt

    training.train(
        model,
        lambda step: cache.dataset(8, seed=0, start_step=step),
        settings,
        validation_dataset=cache.dataset(8, training=False),
        callbacks=[Stop()],
        verbose=0,
    )
    return model


def test_a_run_that_is_stopped_ends_with_the_same_weights(cache, tmp_path):
    whole = run(tmp_path / "whole", cache, 5)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", cache, 5, stop_at=3)
    resumed = run(tmp_path / "stopped", cache, 5)
    for one, other in zip(whole.weights, resumed.weights, strict=True):
        np.testing.assert_array_equal(one, other)
    for name in ("train.csv", "validation.csv"):
        texts = [(tmp_path / d / name).read_text() for d in ("whole", "stopped")]
        assert texts[0] == texts[1]
    assert "kept_mass" in texts[0] and "argmax_agreement" in texts[0]


# --------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"task": "seq2seq"}, "task: the cache is of masked_lm, the student's is seq2seq"),
        ({"k": 6}, "k: 5 entries are kept there, 6 are wanted"),
        ({"temperature": 3.0, "tail": "zero"}, "normalisers are stored at 1, 2"),
        ({"max_length": 4}, "inputs have up to 8 tokens there, the student takes 4"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused_by_name(changes, told, cache):
    check_cache(cache, new_model(1), task="masked_lm")
    with pytest.raises(CacheError) as error:
        check_cache(cache, new_model(1), **changes)
    assert told in str(error.value)


def test_missing_labels_and_states_are_refused(tmp_path, teacher):
    bare = capture_into(tmp_path, teacher, range(3), fields=(), state_width=None)
    with pytest.raises(CacheError, match="needs hard labels"):
        check_cache(bare, new_model(1), label_share=0.5)
    with pytest.raises(CacheError, match="Capture with --with_states"):
        check_cache(bare, new_model(1), state_weight=0.5)


def test_another_tokenizer_is_refused_and_a_longer_one_is_not(cache, vocabulary_file):
    tokenizer = Tokenizer(vocabulary_file)
    identity = cache.manifest["identity"]
    former = identity["tokenizer"]
    try:
        identity["tokenizer"] = {"pieces": 20, "fingerprint": tokenizer.fingerprint(20)}
        check_cache(cache, new_model(1), tokenizer=tokenizer)
        identity["tokenizer"] = {"pieces": 20, "fingerprint": tokenizer.fingerprint(19)}
        with pytest.raises(CacheError, match="do not begin with the 20 of the teacher's"):
            check_cache(cache, new_model(1), tokenizer=tokenizer)
        identity["tokenizer"] = {"pieces": 40, "fingerprint": tokenizer.fingerprint(40)}
        with pytest.raises(CacheError, match="has 40 pieces, the student's head 30 words"):
            check_cache(cache, new_model(1), tokenizer=tokenizer)
    finally:
        identity["tokenizer"] = former


def test_held_out_sequences_that_are_trained_on_are_refused(cache, tmp_path, teacher):
    check_held_out(cache, capture_into(tmp_path / "other", teacher, range(30, 34)))
    with pytest.raises(CacheError, match="4 of the 8 sequences"):
        check_held_out(cache, capture_into(tmp_path / "overlap", teacher, range(20, 28)))
    with pytest.raises(CacheError, match="different teachers"):
        stranger = capture_into(tmp_path / "stranger", new_model(8, width=10), range(40, 42))
        check_held_out(cache, stranger)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mode": "offline"}, "mode must be one of online"),
        ({"mode": "online"}, "online needs the teacher"),
        ({"teacher": "teacher"}, "must not hold it in memory"),
        ({"label_share": 1.5}, "label_share in"),
        ({"state_weight": 1.0}, "state_width"),
        ({"temperature": 0.0}, "temperature must be"),
        ({"tail": "none"}, "tail must be one of"),
    ],
)
def test_options_that_cannot_be_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        Distiller(new_model(1), VOCAB_SIZE, **options)
