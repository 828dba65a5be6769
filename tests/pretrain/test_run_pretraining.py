"""Pretraining from documents to an encoder that other commands start from."""

import json
import os
import pathlib
import subprocess

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import flagsaver

from bigbird.classifier import run_classifier
from bigbird.core import checkpoint, flags
from bigbird.pretrain import run_pretraining
from bigbird.pretrain.model import BertPretrainer

FOLDER = pathlib.Path(run_pretraining.__file__).parent
TINY = {
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_encoder_length": 32,
    "max_predictions_per_seq": 6,
    "train_batch_size": 2,
    "eval_batch_size": 2,
    "num_train_steps": 4,
    "num_warmup_steps": 1,
    "save_checkpoints_steps": 2,
    "log_steps": 1,
    "learning_rate": 1e-2,
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """A directory of JSONL files, one a split."""
    directory = tmp_path_factory.mktemp("data")
    words = "attention block sparse dense matrix memory gradient layer token window".split()
    for split in ("train", "test"):
        texts = [" ".join(words[i:] + words[:i]) for i in range(5)] + [""]
        lines = "".join(json.dumps({"text": text, "label": 0}) + "\n" for text in texts)
        (directory / f"{split}.jsonl").write_text(lines)
    return directory


@pytest.fixture(scope="module")
def pretrain(data_dir, vocabulary_file):
    """Runs the command in this process with tiny sizes, and puts every flag back."""

    def run(output_dir, *more, **changes):
        settings = {
            **TINY,
            "data_dir": data_dir,
            "vocab_model_file": vocabulary_file,
            "output_dir": output_dir,
            **changes,
        }
        with flagsaver.flagsaver():
            flags.FLAGS(["run", *(f"--{k}={v}" for k, v in settings.items()), *more])
            run_pretraining.main([])

    return run


@pytest.fixture(scope="module")
def finished_run(pretrain, tmp_path_factory):
    """Output directory of a run that trained, evaluated and exported."""
    output_dir = tmp_path_factory.mktemp("output") / "run"
    pretrain(output_dir, "--do_eval", "--do_export", "--validation_split=test")
    return output_dir


def _weights(output_dir, step):
    reader = tf.train.load_checkpoint(str(output_dir / "checkpoints" / f"step_{step}" / "ckpt"))
    names = [n for n in reader.get_variable_to_shape_map() if n.endswith("VARIABLE_VALUE")]
    return {name: reader.get_tensor(name) for name in names}


def test_results_are_means_over_predictions(finished_run):
    results = json.loads((finished_run / "eval_results_4.json").read_text())
    assert results["global_step"] == 4
    np.testing.assert_allclose(results["loss"], results["masked_lm_loss"], rtol=1e-4)
    assert 0 <= results["masked_lm_accuracy"] <= 1
    # Near the uniform distribution over 120 pieces after four steps.
    assert 3.5 < results["masked_lm_loss"] < 5.5


def test_a_run_that_was_cut_off_ends_with_the_same_weights(pretrain, finished_run, tmp_path):
    class Killed(Exception):
        pass

    def kill(*args, **kwargs):
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        original = run_pretraining.training.TrainingRecorder.validate
        patch.setattr(
            run_pretraining.training.TrainingRecorder,
            "validate",
            lambda recorder: kill() if recorder.step == 2 else original(recorder),
        )
        with pytest.raises(Killed):
            pretrain(tmp_path / "run", "--validation_split=test")
    assert os.listdir(tmp_path / "run" / "checkpoints").count("step_4") == 0
    pretrain(tmp_path / "run", "--validation_split=test")
    old, new = _weights(finished_run, 4), _weights(tmp_path / "run", 4)
    assert old.keys() == new.keys()
    for name, value in old.items():
        np.testing.assert_array_equal(value, new[name], err_msg=name)
    assert (finished_run / "train.csv").read_text() == (tmp_path / "run" / "train.csv").read_text()


def test_an_export_gives_vectors_of_texts_and_is_a_checkpoint(finished_run):
    served = tf.saved_model.load(str(finished_run / "export")).signatures["serving_default"]
    vectors = served(tf.constant(["attention block", "window"]))
    length = vectors["input_ids"].shape[1]
    assert vectors["sequence_output"].shape == [2, length, 8]
    assert vectors["pooled_output"].shape == [2, 8]
    config = json.loads((finished_run / "config.json").read_text())
    model = BertPretrainer(config)
    report = checkpoint.load_initial_weights(model.bert, str(finished_run / "export"), model.heads)
    assert not report.missing and not report.unused


@pytest.mark.parametrize("part", ["", "best", "checkpoints/step_2", "export"])
def test_the_classifier_starts_from_a_pretrained_encoder(finished_run, part):
    config = json.loads((finished_run / "config.json").read_text())
    classifier = run_classifier.BertClassifier(config, 2)
    heads = {"classifier": classifier.classifier}
    report = checkpoint.load_initial_weights(classifier.bert, str(finished_run / part), heads)
    assert report.missing == ("bert/classifier/bias", "bert/classifier/kernel")
    assert all(name.startswith("cls/predictions/") for name in report.unused)


def test_pretraining_goes_on_from_a_run_without_repeating_its_flags(
    pretrain, finished_run, tmp_path, capsys
):
    pretrain(tmp_path / "run", hidden_size=8, init_checkpoint=finished_run, num_train_steps=1)
    printed = capsys.readouterr().out
    assert f"Training run, step 4: {finished_run}" in printed and "missing 0" in printed


def test_a_model_in_hugging_faces_layout_is_evaluated_without_naming_its_sizes(
    hf_dir, data_dir, vocabulary_file, tmp_path, capsys
):
    arguments = {
        "data_dir": data_dir,
        "vocab_model_file": vocabulary_file,
        "output_dir": tmp_path / "run",
        "init_checkpoint": hf_dir / "hf_bigbird",
        "max_encoder_length": 32,
        "do_train": False,
        "do_eval": True,
    }
    with flagsaver.flagsaver():
        flags.FLAGS(["run", *(f"--{k}={v}" for k, v in arguments.items())])
        run_pretraining.main([])
    printed = capsys.readouterr().out
    assert f"Hugging Face safetensors: {hf_dir}" in printed and "missing 0" in printed
    assert "masked_lm_accuracy" in printed


def test_accumulated_gradients_equal_those_of_the_large_batch(tiny_params):
    model = BertPretrainer(
        {**tiny_params, "attention_type": "original_full", "num_hidden_layers": 1}
    )
    model.compile("sgd", run_seed=0)
    rng = np.random.default_rng(0)
    features = {
        "input_ids": rng.integers(1, 50, [4, 8], np.int32),
        "segment_ids": np.zeros([4, 8], np.int32),
        "masked_lm_positions": rng.integers(0, 8, [4, 3], np.int32),
        "masked_lm_ids": rng.integers(1, 50, [4, 3], np.int32),
        "masked_lm_weights": np.array([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]], np.float32),
    }
    before = [v.numpy() for v in model.trainable_variables]
    model.train_on_batch(features, features)
    whole = [v.numpy() for v in model.trainable_variables]
    for variable, value in zip(model.trainable_variables, before, strict=True):
        variable.assign(value)
    model.compile("sgd", run_seed=0, gradient_accumulation_steps=2)
    model.train_on_batch(features, features)
    for old, new in zip(whole, model.trainable_variables, strict=True):
        # A learning rate of 0.01 times gradients around 1, in float32.
        np.testing.assert_allclose(old, new, atol=1e-7)
    assert any((old != new).any() for old, new in zip(before, whole, strict=True))


def test_next_sentences_are_learnt_from_preprocessed_records(pretrain, tmp_path):
    with tf.io.TFRecordWriter(str(tmp_path / "train.tfrecord")) as writer:
        for number in range(4):
            integers = {
                "input_ids": [65, 70 + number, 67, 66],
                "segment_ids": [0, 0, 1, 1],
                "masked_lm_positions": [2, 0],
                "masked_lm_ids": [9, 0],
                "next_sentence_labels": [number % 2],
            }
            features = {
                name: tf.train.Feature(int64_list=tf.train.Int64List(value=values))
                for name, values in integers.items()
            }
            features["masked_lm_weights"] = tf.train.Feature(
                float_list=tf.train.FloatList(value=[1.0, 0.0])
            )
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())
    pretrain(
        tmp_path / "run",
        "--preprocessed_data",
        "--use_nsp",
        data_dir=tmp_path,
        max_encoder_length=4,
        max_predictions_per_seq=2,
    )
    header, *rows = (tmp_path / "run" / "train.csv").read_text().splitlines()
    assert "next_sentence_loss" in header and "next_sentence_accuracy" in header
    assert len(rows) == 4


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"use_nsp": True}, "--use_nsp needs --preprocessed_data"),
        ({"preprocessed_data": True}, "--preprocessed_data needs TFRecord files"),
        ({"masked_lm_prob": 0}, "masked_lm_prob=0"),
        ({"max_predictions_per_seq": 0}, "max_predictions_per_seq=0"),
        ({"mask_id": 999}, "mask=999"),
        ({"do_train": False}, "Nothing to do: give --do_train"),
        ({"data_dir": "nowhere"}, "data_dir=nowhere"),
        ({"init_checkpoint": "nowhere"}, "init_checkpoint='nowhere'"),
    ],
)
def test_bad_input_is_told_before_anything_is_written(pretrain, tmp_path, changes, told):
    with pytest.raises(ValueError) as error:
        pretrain(tmp_path / "run", **changes)
    assert told in str(error.value)
    assert not (tmp_path / "run").exists()


def test_the_2021_input_function_gives_its_features(data_dir, vocabulary_file):
    with flagsaver.flagsaver():
        flags.FLAGS(["run"])
        input_fn = run_pretraining.input_fn_builder(
            str(data_dir), vocabulary_file, 0.15, 16, 5, False, " ", True
        )
        (features,) = input_fn({"batch_size": 2}).take(1)
    shapes = {name: tuple(value.shape) for name, value in features.items()}
    assert shapes == {
        "input_ids": (2, 16),
        "segment_ids": (2, 16),
        "masked_lm_positions": (2, 5),
        "masked_lm_ids": (2, 5),
        "masked_lm_weights": (2, 5),
        "next_sentence_labels": (2, 1),
    }


def test_the_script_gives_the_base_models_sizes():
    result = subprocess.run(
        [FOLDER / "base_size.sh", "--learning_rate=3"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": "echo"},
        capture_output=True,
        text=True,
        check=True,
    )
    given = result.stdout.split()
    assert given[:2] == ["-m", "bigbird.pretrain.run_pretraining"]
    for flag in ("--max_encoder_length=4096", "--hidden_size=768", "--num_train_steps=100000"):
        assert flag in given
    assert given.index("--learning_rate=1e-4") < given.index("--learning_rate=3")
