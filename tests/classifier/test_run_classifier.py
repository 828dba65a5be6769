"""The classifier from documents to a served model, its scripts and its notebook."""

import json
import pathlib
import shutil
import subprocess
import sys

import nbclient
import nbformat
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import flagsaver

from bigbird.classifier import run_classifier
from bigbird.core import checkpoint, flags, training

FOLDER = pathlib.Path(run_classifier.__file__).parent
TINY = {
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_encoder_length": 32,
    "train_batch_size": 2,
    "eval_batch_size": 2,
    "num_train_steps": 3,
    "num_warmup_steps": 1,
    "save_checkpoints_steps": 2,
    "learning_rate": 1e-3,
}
DOCUMENTS = [
    {"text": "attention block sparse", "label": 0},
    {"text": "dense matrix memory", "label": 1},
    {"text": "gradient layer token window " * 20, "label": 1},
    {"text": "", "label": 0},
    {"text": "caf\u00e9 \u0000 window", "label": 0},
]


def _arguments(**changes):
    return [f"--{name}={value}" for name, value in {**TINY, **changes}.items()]


def _run(*arguments):
    """Runs the command in this process and puts every flag back."""
    with flagsaver.flagsaver():
        flags.FLAGS(["run_classifier", *arguments])
        run_classifier.main([])


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """A directory of JSONL files, one a split."""
    directory = tmp_path_factory.mktemp("data")
    for split in ("train", "test"):
        lines = "".join(json.dumps(document) + "\n" for document in DOCUMENTS)
        (directory / f"{split}.jsonl").write_text(lines)
    return directory


@pytest.fixture(scope="module")
def finished_run(data_dir, vocabulary_file, tmp_path_factory):
    """Output directory of a run that trained, evaluated, exported and predicted."""
    output_dir = tmp_path_factory.mktemp("output") / "run"
    _run(
        *_arguments(
            data_dir=data_dir,
            vocab_model_file=vocabulary_file,
            output_dir=output_dir,
            input_file=data_dir / "test.jsonl",
        ),
        "--validation_split=test",
        "--do_eval",
        "--do_export",
        "--do_predict",
    )
    return output_dir


def _predictions(output_dir):
    return [json.loads(line) for line in (output_dir / "predictions.jsonl").open()]


def test_the_head_is_a_softmax_with_the_mean_cross_entropy():
    head = run_classifier.ClassifierLossLayer(3, 4, name="bert/classifier")
    assert [v.name for v in head.variables] == [
        "bert/classifier/kernel:0",
        "bert/classifier/bias:0",
    ]
    hidden = np.random.default_rng(0).standard_normal([2, 3])
    logits = hidden @ head.kernel.numpy().astype(np.float64) + head.bias.numpy()
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    loss, log_probs = head(tf.constant(hidden, tf.float32), tf.constant([3, 1]))
    np.testing.assert_allclose(log_probs, expected, rtol=1e-5)
    np.testing.assert_allclose(loss, -(expected[0, 3] + expected[1, 1]) / 2, rtol=1e-5)
    assert head(tf.constant(hidden, tf.float32))[0] == 0


def test_results_are_written_as_text_and_json(finished_run):
    results = json.loads((finished_run / "eval_results_3.json").read_text())
    assert results["global_step"] == 3
    lines = (finished_run / "eval_results_3.txt").read_text().splitlines()
    assert f"accuracy = {results['accuracy']}" in lines
    guesses = [prediction["label"] for prediction in _predictions(finished_run)]
    right = np.mean([g == d["label"] for g, d in zip(guesses, DOCUMENTS, strict=True)])
    np.testing.assert_allclose(results["accuracy"], right, rtol=1e-6)


def test_validation_scores_follow_the_checkpoints(finished_run):
    rows = (finished_run / "validation.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", "2", "3"]


def test_every_document_is_scored_in_order_the_empty_one_too(finished_run):
    predictions = _predictions(finished_run)
    assert [p["index"] for p in predictions] == list(range(len(DOCUMENTS)))
    for prediction in predictions:
        np.testing.assert_allclose(sum(prediction["probabilities"]), 1, rtol=1e-5)
        assert prediction["label"] == np.argmax(prediction["probabilities"])


def test_the_export_gives_the_same_numbers_in_a_new_process(finished_run):
    program = (
        "import json, sys, tensorflow as tf, tensorflow_text\n"
        "served = tf.saved_model.load(sys.argv[1]).signatures['serving_default']\n"
        "scores = served(tf.constant(json.loads(sys.argv[2])))\n"
        "print(json.dumps(scores['probabilities'].numpy().tolist()))\n"
    )
    texts = json.dumps([document["text"] for document in DOCUMENTS])
    result = subprocess.run(
        [sys.executable, "-c", program, str(finished_run / "export"), texts],
        capture_output=True,
        text=True,
        check=True,
    )
    expected = [prediction["probabilities"] for prediction in _predictions(finished_run)]
    # Another batch of documents is padded further, so sums may differ in their last bits.
    np.testing.assert_allclose(json.loads(result.stdout), expected, rtol=1e-5)


def test_a_finished_run_is_not_trained_again(finished_run, data_dir, vocabulary_file):
    before = (finished_run / "train.csv").read_text()
    _run(*_arguments(data_dir=data_dir, vocab_model_file=vocabulary_file, output_dir=finished_run))
    assert (finished_run / "train.csv").read_text() == before


def test_another_configuration_in_the_same_directory_is_refused(
    finished_run, data_dir, vocabulary_file
):
    with pytest.raises(ValueError, match="learning_rate: 0.001 there, 0.5 here"):
        _run(
            *_arguments(
                data_dir=data_dir,
                vocab_model_file=vocabulary_file,
                output_dir=finished_run,
                learning_rate=0.5,
            )
        )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_size": 9}, "hidden_size=9"),
        ({"max_encoder_length": 5000}, "max_encoder_length=5000"),
        ({"hidden_act": "sine"}, "hidden_act='sine'"),
        ({"vocab_model_file": "nowhere.model"}, "vocab_model_file=nowhere.model"),
        ({"data_dir": "nowhere"}, "data_dir=nowhere"),
        ({"num_labels": 1}, "example 1 (counted from 0)"),
        ({"num_labels": 1}, "at least 0 and below --num_labels=1"),
        ({"max_encoder_length": 2}, "max_encoder_length=2: expected at least 3"),
        ({"learning_rate": -1}, "learning_rate=-1"),
        ({"do_predict": True, "input_file": "nowhere.jsonl"}, "--input_file=nowhere.jsonl"),
        ({"do_train": False, "do_eval": True}, "holds no checkpoint"),
        ({"num_train_steps": 0}, "num_train_steps=0"),
        ({"gradient_checkpointing_policy": "auto"}, "set --memory_budget_gb"),
        ({"init_checkpoint": "nowhere/model.ckpt-0"}, "init_checkpoint='nowhere/model.ckpt-0'"),
        ({"do_train": False, "do_predict": True}, "--input_file"),
        ({"do_train": False}, "Nothing to do"),
        ({"validation_split": "train"}, "validation_split=train"),
    ],
)
def test_bad_input_is_told_before_anything_is_written(
    changes, told, data_dir, vocabulary_file, tmp_path
):
    settings = {"data_dir": data_dir, "vocab_model_file": vocabulary_file}
    output_dir = tmp_path / "run"
    with pytest.raises(ValueError) as error:
        _run(*_arguments(**{**settings, "output_dir": output_dir, **changes}))
    assert told in str(error.value)
    assert not output_dir.exists()


def test_the_run_says_what_the_model_is(finished_run, tmp_path):
    _run(
        f"--output_dir={finished_run}",
        "--do_train=False",
        "--do_predict",
        f"--input_file={_text_file(tmp_path)}",
        f"--output_file={tmp_path / 'new' / 'scores.jsonl'}",
    )
    scores = [json.loads(line) for line in (tmp_path / "new" / "scores.jsonl").open()]
    np.testing.assert_allclose(
        scores[0]["probabilities"], _predictions(finished_run)[0]["probabilities"], rtol=1e-5
    )


def _text_file(directory):
    path = directory / "documents.txt"
    path.write_text(DOCUMENTS[0]["text"] + "\n")
    return path


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_attention_heads": 4}, "num_attention_heads: 2 there, 4 here"),
        ({"max_encoder_length": 16}, "max_encoder_length: 32 there, 16 here"),
        ({"num_labels": 3}, "num_labels: 2 there, 3 here"),
        ({"cls_id": 3}, "cls_id: 65 there, 3 here"),
    ],
)
def test_flags_that_contradict_the_run_are_refused(changes, told, finished_run, tmp_path):
    with pytest.raises(ValueError, match=told):
        _run(
            f"--output_dir={finished_run}",
            "--do_train=False",
            "--do_predict",
            f"--input_file={_text_file(tmp_path)}",
            *(f"--{name}={value}" for name, value in changes.items()),
        )


def test_class_names_go_with_the_run(vocabulary_file, tmp_path):
    lines = [{"text": d["text"], "label": ("no", "yes")[d["label"]]} for d in DOCUMENTS]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = tmp_path / "run"
    _run(*_arguments(data_dir=tmp_path, vocab_model_file=vocabulary_file, output_dir=run))
    _run(
        f"--output_dir={run}",
        "--do_train=False",
        "--do_predict",
        "--do_export",
        f"--input_file={_text_file(tmp_path)}",
    )
    (prediction,) = _predictions(run)
    assert prediction["name"] == ("no", "yes")[prediction["label"]]
    served = tf.saved_model.load(str(run / "export")).signatures["serving_default"]
    assert served(tf.constant([DOCUMENTS[0]["text"]]))["name"] == prediction["name"]


def test_initial_weights_serve_until_there_is_a_run(finished_run, data_dir, vocabulary_file):
    assert training.has_weights(finished_run)
    assert not training.has_weights(data_dir)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([], "holds no examples"),
        (['{"text": "a", "label": 0}', '{"text": "b"}'], "line 2: expected the field label"),
        (['{"text": "a", "label": 0}', '{"text": '], "line 2 is not valid JSON"),
    ],
)
def test_bad_training_data_is_told_before_anything_is_written(
    lines, told, vocabulary_file, tmp_path
):
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    output_dir = tmp_path / "run"
    with pytest.raises(ValueError) as error:
        _run(
            *_arguments(data_dir=tmp_path, vocab_model_file=vocabulary_file, output_dir=output_dir)
        )
    assert told in str(error.value)
    assert not output_dir.exists()


def test_the_2021_input_function_gives_ids_and_labels(data_dir, vocabulary_file):
    with flagsaver.flagsaver():
        flags.FLAGS(["run_classifier"])
        input_fn = run_classifier.input_fn_builder(str(data_dir), vocabulary_file, 16, " ", True)
        for ids, labels in input_fn({"batch_size": 2}).take(3):
            assert ids.shape == [2, 16] and ids.dtype == tf.int32
            assert labels.shape == [2] and labels.dtype == tf.int32
            assert (ids.numpy()[:, 0] == 65).all()


def _script(name, *arguments, **environment):
    """Returns the flags that a script would give to its command."""
    result = subprocess.run(
        [FOLDER / name, *arguments],
        env={"PATH": "/usr/bin:/bin", "PYTHON": "echo", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.startswith("-m bigbird.classifier.run_classifier ")
    return result.stdout.split()[2:]


def test_base_size_has_the_2021_settings():
    given = _script("base_size.sh")
    for flag in (
        "--max_encoder_length=4096",
        "--block_size=64",
        "--num_hidden_layers=12",
        "--hidden_size=768",
        "--learning_rate=1e-5",
        "--num_train_steps=16000",
    ):
        assert flag in given


def test_large_size_is_base_size_with_larger_sizes():
    base, large = _script("base_size.sh"), _script("large_size.sh")
    changed = {flag.split("=")[0] for flag in set(base) ^ set(large)}
    assert changed == {
        "--num_hidden_layers",
        "--num_attention_heads",
        "--hidden_size",
        "--intermediate_size",
    }


def test_settings_of_a_script_can_be_overridden():
    given = _script("large_size.sh", "--hidden_size=8", HIDDEN_SIZE="4", INIT_CHECKPOINT="c/m")
    assert given.index("--hidden_size=4") < given.index("--hidden_size=8")
    assert "--init_checkpoint=c/m" in given


def test_a_script_trains_under_auto_clustering(data_dir, vocabulary_file, tmp_path):
    arguments = _arguments(
        data_dir=data_dir, vocab_model_file=vocabulary_file, output_dir=tmp_path / "run"
    )
    result = subprocess.run(
        [FOLDER / "base_size.sh", *arguments, "--num_train_steps=1"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert (tmp_path / "run" / "eval_results_1.json").exists()


def test_the_notebook_runs(data_dir, vocabulary_file, monkeypatch):
    monkeypatch.setenv("FAST", "1")
    monkeypatch.setenv("DATA_DIR", str(data_dir))
    monkeypatch.setenv("VOCAB_MODEL_FILE", vocabulary_file)
    monkeypatch.setenv("NUM_LABELS", "2")
    notebook = nbformat.read(FOLDER / "imdb.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])
    )
    assert "parameters in" in printed and "accuracy" in printed


def test_hugging_faces_classifier_is_evaluated_and_served_without_naming_its_sizes(
    hf_dir, data_dir, vocabulary_file, tmp_path, capsys
):
    directory = tmp_path / "downloaded"
    shutil.copytree(hf_dir / "hf_bigbird_classifier", directory)
    shutil.copyfile(vocabulary_file, directory / "spiece.model")
    output_dir = tmp_path / "run"
    _run(
        f"--init_checkpoint={directory}",
        f"--data_dir={data_dir}",
        f"--output_dir={output_dir}",
        f"--input_file={data_dir / 'test.jsonl'}",
        "--max_encoder_length=640",
        "--do_train=False",
        "--do_eval",
        "--do_predict",
        "--do_export",
    )
    printed = capsys.readouterr().out
    assert f"Hugging Face safetensors: {directory}" in printed
    assert "missing 0" in printed and "unused 0" in printed
    assert all(len(p["probabilities"]) == 3 for p in _predictions(output_dir))


def test_the_class_that_reads_the_first_token_equals_the_recorded_classifier(hf_dir):
    directory = str(hf_dir / "hf_bigbird_classifier")
    model = run_classifier.BertClassifier(
        checkpoint.config_from_pretrained(directory), 3, classifier_transform=True
    )
    checkpoint.load_safetensors(model.bert, directory, model.heads)
    recorded = np.load(hf_dir / "hf_bigbird_classifier" / "io.npz")
    # Float32 sums in different orders.
    np.testing.assert_allclose(
        model(recorded["input_ids"]), tf.nn.log_softmax(recorded["logits"]), rtol=0, atol=5e-5
    )
