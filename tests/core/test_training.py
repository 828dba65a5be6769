"""Training: seeds, accumulation, exact resume after any death, logs, evaluation, export.

Run as a program, this file is the process that a test kills or that trains on two replicas.
"""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bigbird.core import callbacks
from bigbird.core.devices import precision_scope
from bigbird.core.optimization import AdamWeightDecay, LinearWarmupLinearDecay
from bigbird.core.recompute_grad import RecomputingDropout
from bigbird.core.training import (
    SeededModel,
    TrainingSettings,
    evaluate,
    export_saved_model,
    restore_weights,
    train,
)

VOCABULARY, LENGTH = 16, 6


class TinyClassifier(SeededModel):
    """Embedding, dropout, mean and two classes; every initializer has a seed."""

    def __init__(self, rate=0.3):
        super().__init__()
        uniform = keras.initializers.RandomUniform
        self.table = keras.layers.Embedding(VOCABULARY, 8, uniform(-1, 1, seed=1))
        self.dropout = RecomputingDropout(rate, name="dropout")
        self.dense = keras.layers.Dense(2, kernel_initializer=uniform(-1, 1, seed=2))

    def call(self, ids, training=None):
        hidden = self.dropout(self.table(ids), training=training)
        return self.dense(tf.reduce_mean(hidden, axis=1))


class PredictionRecorder(TinyClassifier):
    """Keeps what each forward pass of a training step in eager mode predicted."""

    def __init__(self, rate):
        super().__init__(rate)
        self.predictions = []

    def compute_metrics(self, x, y, y_pred, sample_weight):
        self.predictions.append(y_pred.numpy())
        return {}


def compiled_classifier(
    settings, rate=0.3, learning_rate=0.05, model_class=TinyClassifier, **compile_arguments
):
    model = model_class(rate)
    model(tf.zeros([1, LENGTH], tf.int32))
    schedule = LinearWarmupLinearDecay(learning_rate, settings.num_train_steps, 3)
    model.compile(
        AdamWeightDecay(schedule),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        ["accuracy"],
        **{**settings.compile_arguments(), **compile_arguments},
    )
    return model


def batch(step, size=8):
    """The batch of a step: random ids, labelled by whether the first is among the lower half."""
    seed = tf.stack([tf.cast(step, tf.int32), 7])
    ids = tf.random.stateless_uniform([size, LENGTH], seed, 0, VOCABULARY, tf.int32)
    return ids, tf.cast(ids[:, 0] < VOCABULARY // 2, tf.int32)


def make_dataset(start_step):
    return tf.data.Dataset.counter(tf.cast(start_step, tf.int64)).map(batch)


def validation_dataset():
    return tf.data.Dataset.range(1000, 1002).map(batch)


def make_settings(output_dir, **changes):
    values = {
        "num_train_steps": 12,
        "train_batch_size": 8,
        "save_checkpoints_steps": 5,
        "log_steps": 2,
        "keep_checkpoints": 2,
        "best_metric": "accuracy",
        "best_mode": "max",
        "seed": 3,
    }
    return TrainingSettings(output_dir=str(output_dir), **{**values, **changes})


def run(settings, run_eagerly=True, **train_arguments):
    """Trains a new model, as a new process would, and returns it.

    Eagerly, unless told otherwise: 12 steps take less time than tracing one.
    """
    model = compiled_classifier(settings, run_eagerly=run_eagerly)
    train(
        model,
        make_dataset,
        settings,
        validation_dataset=validation_dataset(),
        verbose=0,
        **train_arguments,
    )
    return model


def assert_same_weights(model, expected):
    for variable, other in zip(model.weights, expected.weights, strict=True):
        np.testing.assert_array_equal(variable.numpy(), other.numpy(), err_msg=variable.name)


def assert_same_run(output_dir, expected_dir):
    """Compares the logs byte for byte and the weights of the newest and the best checkpoint."""
    for name in ("train.csv", "validation.csv", "config.json"):
        assert Path(output_dir, name).read_text() == Path(expected_dir, name).read_text()
    for best in (False, True):
        model, expected = TinyClassifier(), TinyClassifier()
        for each in (model, expected):
            each(tf.zeros([1, LENGTH], tf.int32))
        step = restore_weights(model, str(output_dir), best=best)
        assert step == restore_weights(expected, str(expected_dir), best=best)
        assert_same_weights(model, expected)


def long_settings(output_dir):
    """Settings of a run that takes long enough to be killed on its way."""
    return make_settings(output_dir, num_train_steps=200, save_checkpoints_steps=20, log_steps=5)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A finished run of 12 steps, its settings and its model."""
    settings = make_settings(tmp_path_factory.mktemp("uninterrupted") / "run")
    return settings, run(settings)


def read_csv(path):
    with open(path, newline="") as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


def run_program(*arguments):
    """Starts Python in a process of its own."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )


class TestSettings:
    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("num_train_steps", 0, "num_train_steps=0: expected at least 1"),
            ("log_steps", -1, "log_steps=-1: expected at least 1"),
            ("keep_checkpoints", 0, "keep_checkpoints=0: expected at least 1"),
            ("seed", -1, "seed=-1: expected a number in"),
            ("mixed_precision", "float16", "mixed_precision='float16': expected one of float32"),
            ("best_mode", "most", "best_mode='most': expected one of min, max"),
            ("gradient_accumulation_steps", 3, "train_batch_size=8 is not divisible by 3"),
        ],
    )
    def test_bad_value_is_named_with_its_remedy(self, field, value, message):
        with pytest.raises(ValueError, match=message):
            make_settings("unused", **{field: value})


def three_losses(**compile_arguments):
    """Trains a new model for three steps and returns their losses."""
    model = compiled_classifier(make_settings("unused"), **compile_arguments)
    return [model.train_on_batch(*batch(step))[0] for step in range(3)]


class TestSeeds:
    @pytest.fixture(scope="class")
    def graph_losses(self):
        return three_losses()

    def test_dropout_does_not_depend_on_retracing_or_the_global_generator(self, graph_losses):
        tf.random.uniform([])
        assert three_losses() == graph_losses

    @pytest.mark.parametrize("mode", ["run_eagerly", "jit_compile"])
    def test_dropout_is_the_same_in_every_mode(self, graph_losses, mode):
        arguments = {"jit_compile": False, mode: True}
        # The masks are equal bit for bit; the modes round the losses differently.
        np.testing.assert_allclose(three_losses(**arguments), graph_losses, rtol=1e-5)

    def test_another_seed_gives_other_masks(self, graph_losses):
        other = three_losses(run_seed=4, run_eagerly=True)
        assert other[0] != pytest.approx(graph_losses[0], rel=1e-4)

    def test_two_steps_on_one_batch_draw_different_masks(self):
        settings = make_settings("unused")
        model = compiled_classifier(settings, learning_rate=0.0, run_eagerly=True)
        first, second = (model.train_on_batch(*batch(0))[0] for _ in range(2))
        assert first != second


class TestAccumulation:
    # Sums of eight float32 gradients in another order, through Adam's quotient.
    TOLERANCE = {"rtol": 2e-4, "atol": 1e-6}

    def train_steps(self, model, steps=4):
        for step in range(steps):
            ids, labels = batch(step)
            model.train_on_batch(ids, labels)
        return model

    @pytest.mark.parametrize("jit_compile", [False, True])
    def test_accumulation_equals_the_large_batch(self, jit_compile):
        large, accumulated = (
            self.train_steps(
                compiled_classifier(
                    make_settings("unused"),
                    rate=0.0,
                    gradient_accumulation_steps=count,
                    jit_compile=jit_compile and count > 1,
                    run_eagerly=count == 1,
                )
            )
            for count in (1, 4)
        )
        for variable, expected in zip(accumulated.weights, large.weights, strict=True):
            np.testing.assert_allclose(variable.numpy(), expected.numpy(), **self.TOLERANCE)
        results = {metric.name: float(metric.result()) for metric in accumulated.metrics}
        expected = {metric.name: float(metric.result()) for metric in large.metrics}
        assert results == pytest.approx(expected, rel=1e-5)

    def test_parts_of_a_batch_draw_different_masks(self):
        settings = make_settings("unused", gradient_accumulation_steps=2)
        model = compiled_classifier(settings, model_class=PredictionRecorder, run_eagerly=True)
        ids, labels = batch(0, size=4)
        model.train_on_batch(tf.tile(ids, [2, 1]), tf.tile(labels, [2]))
        first, second = model.predictions
        assert not np.allclose(first, second)

    def test_mean_over_tokens_equals_the_large_batch(self):
        class MaskedMean(SeededModel):
            """The loss is a mean over the tokens that are not 0, of a number per token."""

            def __init__(self):
                super().__init__()
                self.table = keras.layers.Embedding(
                    VOCABULARY, 1, keras.initializers.RandomUniform(seed=5)
                )

            def call(self, ids):
                return self.table(ids)[..., 0]

            def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
                mask = tf.cast(x > 0, tf.float32)
                return tf.reduce_sum(mask * (y_pred - 1.0) ** 2) / tf.reduce_sum(mask)

            def loss_weight(self, data):
                return tf.math.count_nonzero(data)

        ids = np.array(batch(0)[0])
        ids[:4, 1:] = 0  # The first parts hold far fewer tokens than the last.
        ids[:, 0] = 1 + ids[:, 0] % 7
        models = []
        for count in (1, 4):
            model = MaskedMean()
            model(ids)
            model.compile("sgd", run_seed=0, gradient_accumulation_steps=count)
            model.train_on_batch(ids)
            models.append(model)
        np.testing.assert_allclose(*(m.weights[0].numpy() for m in models), rtol=1e-6)

    def test_variable_that_the_loss_does_not_reach_is_not_decayed(self):
        settings = make_settings("unused", gradient_accumulation_steps=2)
        model = TinyClassifier()
        model.pooler = keras.layers.Dense(3)
        model.pooler.build([None, 8])
        before = model.pooler.kernel.numpy()
        model(tf.zeros([1, LENGTH], tf.int32))
        model.compile(
            AdamWeightDecay(0.1, weight_decay=0.5),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            run_eagerly=True,
            **settings.compile_arguments(),
        )
        model.train_on_batch(*batch(0))
        np.testing.assert_array_equal(model.pooler.kernel.numpy(), before)


class TestRun:
    def test_rows_stand_at_every_log_step_and_checkpoint(self, uninterrupted):
        settings, _ = uninterrupted
        rows = read_csv(Path(settings.output_dir, "train.csv"))
        steps = [step for step in range(1, 13) if step % 2 == 0 or step % 5 == 0]
        assert [row["step"] for row in rows] == steps
        assert list(rows[0]) == ["step", "loss", "accuracy", "learning_rate"]
        # The rate of the update that made the step, which is that of the step before.
        assert rows[0]["learning_rate"] == pytest.approx(0.05 / 3)
        assert rows[-1]["learning_rate"] == pytest.approx(0.05 / 12)

    def test_row_is_the_mean_since_the_row_before(self, tmp_path, uninterrupted):
        settings, _ = uninterrupted
        every_step = make_settings(tmp_path / "run", log_steps=1)
        run(every_step)
        losses = [row["loss"] for row in read_csv(Path(every_step.output_dir, "train.csv"))]
        begin = 0
        for row in read_csv(Path(settings.output_dir, "train.csv")):
            end = int(row["step"])
            assert row["loss"] == pytest.approx(np.mean(losses[begin:end]), rel=1e-5)
            begin = end

    def test_tensorboard_reads_the_numbers_of_the_table(self, uninterrupted):
        settings, _ = uninterrupted
        for name in ("train", "validation"):
            events = EventAccumulator(str(Path(settings.output_dir, name)), {"tensors": 0}).Reload()
            rows = read_csv(Path(settings.output_dir, f"{name}.csv"))
            for tag in ("loss", "accuracy"):
                points = events.Tensors(tag)
                assert [point.step for point in points] == [row["step"] for row in rows]
                values = [tf.make_ndarray(point.tensor_proto) for point in points]
                np.testing.assert_allclose(values, [row[tag] for row in rows], rtol=1e-6)

    def test_newest_checkpoints_are_kept_and_the_best_validation(self, uninterrupted):
        settings, model = uninterrupted
        assert sorted(os.listdir(Path(settings.output_dir, "checkpoints"))) == [
            "step_10",
            "step_12",
        ]
        rows = read_csv(Path(settings.output_dir, "validation.csv"))
        assert [row["step"] for row in rows] == [5, 10, 12]
        accuracies = [row["accuracy"] for row in rows]
        best = compiled_classifier(settings)
        step = restore_weights(best, settings.output_dir, best=True)
        assert step == rows[int(np.argmax(accuracies))]["step"]
        scores = best.evaluate(validation_dataset(), verbose=0, return_dict=True)
        assert scores["accuracy"] == pytest.approx(max(accuracies))

    def test_nan_is_never_the_best_and_does_not_stay_the_best(self, tmp_path, monkeypatch):
        scores = iter([{"accuracy": value} for value in (0.1, np.nan, 0.5, np.nan, 0.4)])
        settings = make_settings(tmp_path / "run", save_checkpoints_steps=3)
        monkeypatch.setattr(
            callbacks.TrainingRecorder, "_score", lambda self, dataset: next(scores)
        )
        run(settings)  # One batch is scored at the start; steps 3, 6, 9 and 12 follow.
        assert os.listdir(Path(settings.output_dir, "best")) == ["step_6"]

    def test_finished_run_is_left_as_it_is(self, uninterrupted, caplog):
        caplog.set_level("INFO", logger="absl")
        settings, expected = uninterrupted
        before = {p: p.read_bytes() for p in Path(settings.output_dir).rglob("*") if p.is_file()}
        assert_same_weights(run(settings), expected)
        for path, content in before.items():
            assert path.read_bytes() == content, path
        assert f"is finished, after {settings.num_train_steps} steps" in caplog.text

    def test_effective_batch_size_is_logged(self, tmp_path, caplog):
        caplog.set_level("INFO", logger="absl")
        settings = make_settings(tmp_path / "run", gradient_accumulation_steps=4, num_train_steps=1)
        run(settings)
        assert (
            "Effective batch size 8: 1 replica(s) x 4 accumulation step(s) x 2 example(s)."
            in caplog.text
        )


class Killed(BaseException):
    """Stands for the end of the process; nothing catches it."""


def die_at(monkeypatch, moment):
    """Ends the run before the `moment`-th of all its writes and renames."""
    count = 0

    def counted(function):
        def write(*args, **kwargs):
            nonlocal count
            count += 1
            if count == moment:
                raise Killed
            return function(*args, **kwargs)

        return write

    monkeypatch.setattr(tf.io.gfile, "rename", counted(tf.io.gfile.rename))
    monkeypatch.setattr(callbacks.ScalarLog, "write", counted(callbacks.ScalarLog.write))
    monkeypatch.setattr(callbacks.Checkpoints, "save", counted(callbacks.Checkpoints.save))


class TestResume:
    def test_killed_process_ends_with_the_same_run_bit_for_bit(self, tmp_path):
        seed = int.from_bytes(os.urandom(4), "little")
        print(f"random moment of the kill: seed {seed}")
        rng = np.random.default_rng(seed)
        killed, expected = long_settings(tmp_path / "killed"), long_settings(tmp_path / "expected")
        process = run_program(__file__, "train", killed.output_dir)
        checkpoints = Path(killed.output_dir, "checkpoints")
        while not (checkpoints / f"step_{20 * rng.integers(0, 5)}").exists():
            assert process.poll() is None
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.05))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert not (checkpoints / f"step_{killed.num_train_steps}").exists()

        resumed = run(killed, run_eagerly=False)
        assert_same_weights(resumed, run(expected, run_eagerly=False))
        assert_same_run(killed.output_dir, expected.output_dir)

    # In the configuration and the first checkpoint; then, about step 5, between the row and the
    # checkpoint, in the checkpoint, in that of the best weights, in the row of the validation.
    @pytest.mark.parametrize("moment", [1, 3, 8, 9, 11, 13])
    def test_death_at_any_write_changes_nothing(self, tmp_path, monkeypatch, uninterrupted, moment):
        expected_settings, expected = uninterrupted
        settings = make_settings(tmp_path / "run")
        with monkeypatch.context() as patch, pytest.raises(Killed):
            die_at(patch, moment)
            run(settings)
        assert_same_weights(run(settings), expected)
        assert_same_run(settings.output_dir, expected_settings.output_dir)

    def test_torn_checkpoint_falls_back_to_the_one_before(self, tmp_path, uninterrupted, caplog):
        expected_settings, expected = uninterrupted
        settings = make_settings(tmp_path / "run")
        run(settings)
        (data,) = Path(settings.output_dir, "checkpoints", "step_12").glob("*.data*")
        data.write_bytes(data.read_bytes()[:-100])
        assert_same_weights(run(settings), expected)
        assert "step_12 cannot be read, trying the one before it" in caplog.text
        assert_same_run(settings.output_dir, expected_settings.output_dir)

        for index in Path(settings.output_dir, "checkpoints").rglob("*.index"):
            index.write_bytes(b"")
        with pytest.raises(ValueError, match=r"None of the checkpoints of the steps \[10, 12\]"):
            run(settings)

    def test_sigterm_saves_the_step_and_ends_the_process(self, tmp_path, uninterrupted):
        expected_settings, expected = uninterrupted
        settings = make_settings(tmp_path / "run")

        def terminate(step, ids, labels):
            def signal_self(step):
                if step == 7:
                    os.kill(os.getpid(), signal.SIGTERM)
                return step

            with tf.control_dependencies([tf.py_function(signal_self, [step], tf.int64)]):
                return tf.identity(ids), labels

        def terminating_dataset(start_step):
            steps = tf.data.Dataset.counter(tf.cast(start_step, tf.int64))
            return steps.map(lambda step: terminate(step, *batch(step)))

        model = compiled_classifier(settings, run_eagerly=True)
        former = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit) as exit_status:
            train(model, terminating_dataset, settings, verbose=0)
        assert exit_status.value.code == 128 + signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is former
        stopped = int(model.optimizer.iterations)
        assert stopped < settings.num_train_steps
        assert Path(settings.output_dir, "checkpoints", f"step_{stopped}").exists()
        assert_same_weights(run(settings), expected)

    def test_loss_scale_is_resumed(self, tmp_path):
        settings = make_settings(tmp_path / "run", mixed_precision="mixed_float16")
        with precision_scope("mixed_float16"):
            first, second = compiled_classifier(settings), compiled_classifier(settings)
        train(first, make_dataset, settings, verbose=0)
        train(second, make_dataset, settings, verbose=0)
        assert int(second.optimizer.dynamic_counter) == int(first.optimizer.dynamic_counter) == 12
        assert_same_weights(second, first)


class TestRefusals:
    def test_directory_of_another_configuration_is_refused_untouched(self, uninterrupted):
        settings, _ = uninterrupted
        before = {p: p.stat().st_mtime_ns for p in Path(settings.output_dir).rglob("*")}
        other = make_settings(settings.output_dir, seed=9)
        with pytest.raises(ValueError, match=r"hidden_size: nothing there, 8 here; seed: 3 there"):
            run(other, config={"hidden_size": 8})
        assert before == {p: p.stat().st_mtime_ns for p in Path(settings.output_dir).rglob("*")}

    def test_how_often_to_save_may_change_on_resume(self, tmp_path, uninterrupted):
        _, expected = uninterrupted
        stopped = make_settings(tmp_path / "run")
        with pytest.raises(ValueError, match="training data ended before step 12"):
            train(
                compiled_classifier(stopped, run_eagerly=True),
                lambda step: make_dataset(step).take(7 - step),
                stopped,
                config={"shape": (1, 2)},
                verbose=0,
            )
        resumed = make_settings(stopped.output_dir, save_checkpoints_steps=3, log_steps=4)
        assert_same_weights(run(resumed, config={"shape": (1, 2)}), expected)

    def test_bad_data_is_reported_before_anything_is_written(self, tmp_path):
        settings = make_settings(tmp_path / "run")

        def no_data(start_step):
            raise ValueError(f"zero examples at {start_step}")

        with pytest.raises(ValueError, match="zero examples at 0"):
            train(compiled_classifier(settings), no_data, settings)
        assert not Path(settings.output_dir).exists()

    def test_model_that_is_not_ready_is_refused(self, tmp_path):
        settings = make_settings(tmp_path / "run")
        other_seed = compiled_classifier(make_settings(tmp_path / "run", seed=4))
        with pytest.raises(ValueError, match="not compiled for these settings"):
            train(other_seed, make_dataset, settings)
        unbuilt = TinyClassifier()
        unbuilt.compile("sgd", **settings.compile_arguments())
        with pytest.raises(ValueError, match="no variables yet"):
            train(unbuilt, make_dataset, settings)
        half = make_settings(tmp_path / "run", mixed_precision="mixed_bfloat16")
        with pytest.raises(ValueError, match="computes in float32 and mixed_precision='mixed_bf"):
            train(compiled_classifier(half), make_dataset, half)
        used = compiled_classifier(settings)
        used.train_on_batch(*batch(0))
        with pytest.raises(ValueError, match="has made 1 updates already"):
            train(used, make_dataset, settings)
        assert not Path(settings.output_dir).exists()

    def test_misspelt_metric_is_found_before_the_first_step(self, tmp_path):
        settings = make_settings(tmp_path / "run", best_metric="acuracy")
        with pytest.raises(ValueError, match="best_metric='acuracy': validation gives loss, acc"):
            run(settings)
        assert not Path(settings.output_dir, "train.csv").exists()

    def test_infinite_loss_stops_at_its_step_and_keeps_the_checkpoints(self, tmp_path):
        settings = make_settings(tmp_path / "run")
        model = compiled_classifier(settings, run_eagerly=True)

        def poisoned(step, ids, labels):
            return ids, labels, tf.where(step == 7, np.nan, tf.ones(8))

        def poisoned_dataset(start_step):
            steps = tf.data.Dataset.counter(tf.cast(start_step, tf.int64))
            return steps.map(lambda step: poisoned(step, *batch(step)))

        message = r"The loss is not finite at step 8; the checkpoints of the steps \[0, 5\]"
        with pytest.raises(FloatingPointError, match=message):
            train(model, poisoned_dataset, settings, verbose=0)

    def test_weights_that_are_not_finite_are_not_saved(self, tmp_path):
        settings = make_settings(tmp_path / "run")
        model = compiled_classifier(settings)
        model.table.embeddings[VOCABULARY - 1, 0].assign(np.nan)
        with pytest.raises(FloatingPointError, match="embeddings:0 is not finite at step 0"):
            train(model, make_dataset, settings, verbose=0)


class TestEvaluate:
    def test_every_example_counts_once(self, tmp_path):
        settings = make_settings(tmp_path / "run")
        model = compiled_classifier(settings)
        ids, labels = batch(0, size=7)
        results = evaluate(
            model,
            tf.data.Dataset.from_tensor_slices((ids, labels)).batch(3),
            settings,
            step=40,
            verbose=0,
        )
        log_probs = tf.nn.log_softmax(model(ids)).numpy()
        losses = -log_probs[np.arange(7), labels]
        assert results["loss"] == pytest.approx(losses.mean(), rel=1e-6)
        assert results["accuracy"] == pytest.approx(np.mean(log_probs.argmax(1) == labels))

        path = Path(settings.output_dir, "eval_results_40")
        assert json.loads(path.with_suffix(".json").read_text()) == results
        lines = path.with_suffix(".txt").read_text().splitlines()
        assert {k: float(v) for k, v in (line.split(" = ") for line in lines)} == results

    @pytest.mark.parametrize(
        ("dataset", "message"),
        [
            (lambda: make_dataset(0), "has no end"),
            (lambda: validation_dataset().take(0), "is empty"),
        ],
    )
    def test_dataset_without_end_or_examples_is_refused(self, tmp_path, dataset, message):
        settings = make_settings(tmp_path / "run")
        with pytest.raises(ValueError, match=message):
            evaluate(compiled_classifier(settings), dataset(), settings, step=0)

    def test_restoring_from_a_directory_without_a_run_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="holds no checkpoint"):
            restore_weights(TinyClassifier(), str(tmp_path))


class Scorer(tf.Module):
    """Scores texts by their length and a weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight = tf.Variable(weight)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def serve(self, texts):
        lengths = tf.cast(tf.strings.length(texts), tf.float32)
        return {"score": tf.sigmoid(self.weight * lengths)}


class TestExport:
    def test_export_serves_the_numbers_of_the_module_and_replaces_an_older_one(self, tmp_path):
        path = str(tmp_path / "export")
        export_saved_model(Scorer(0.5), path)
        scorer = Scorer(0.25)
        export_saved_model(scorer, path)
        assert os.listdir(tmp_path) == ["export"]
        served = tf.saved_model.load(path).signatures["serving_default"]
        texts = tf.constant(["", "a", "a document"])
        np.testing.assert_array_equal(served(texts)["score"], scorer.serve(texts)["score"])

    def test_module_without_a_signature_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="Module.serve must be a tf.function"):
            export_saved_model(tf.Module(), str(tmp_path / "export"))
        assert not os.listdir(tmp_path)


class TestDistribution:
    def test_two_replicas_resume_and_train_as_one_and_draw_different_masks(self, tmp_path):
        one, two = make_settings(tmp_path / "one"), make_settings(tmp_path / "two")
        expected = compiled_classifier(one, rate=0.0, run_eagerly=True)
        train(expected, make_dataset, one, verbose=0)
        begun = compiled_classifier(two, rate=0.0, run_eagerly=True)
        with pytest.raises(ValueError, match="training data ended"):
            train(begun, lambda start_step: make_dataset(start_step).take(7), two, verbose=0)

        assert run_program(__file__, "replicas", two.output_dir).wait() == 0
        model = compiled_classifier(two)
        assert restore_weights(model, two.output_dir) == 12
        for variable, other in zip(model.weights, expected.weights, strict=True):
            # Halves of a batch are summed in another order, 7 times.
            np.testing.assert_allclose(variable.numpy(), other.numpy(), rtol=1e-3, atol=1e-5)


def train_on_two_replicas(output_dir):
    """Takes up a run on two logical CPUs; then compares the dropout masks of the two."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    settings = make_settings(output_dir)
    with strategy.scope():
        model = compiled_classifier(settings, rate=0.0)
    train(model, make_dataset, settings, verbose=0)

    with strategy.scope():
        model = compiled_classifier(settings, model_class=PredictionRecorder)
    strategy.run(model.train_step, args=(batch(0),))
    first, second = model.predictions
    assert not np.allclose(first, second), "both replicas drew the same mask"


if __name__ == "__main__":
    task, directory = sys.argv[1:]
    if task == "train":
        run(long_settings(directory), run_eagerly=False)
    else:
        train_on_two_replicas(directory)
