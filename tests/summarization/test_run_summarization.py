"""The summarizer from pairs to a served model, its scripts and its notebooks."""

import importlib
import json
import pathlib
import subprocess

import nbclient
import nbformat
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import flagsaver

from bigbird.core import flags
from bigbird.summarization import run_summarization
from bigbird.summarization.model import ServedSummarizer

FOLDER = pathlib.Path(run_summarization.__file__).parent
TINY = {
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_encoder_length": 32,
    "max_decoder_length": 8,
    "beam_size": 2,
    "forced_first_ids": 90,
    "train_batch_size": 2,
    "eval_batch_size": 2,
    "num_train_steps": 3,
    "num_warmup_steps": 1,
    "save_checkpoints_steps": 2,
    "learning_rate": 1e-1,
}
PAIRS = [
    {"document": "attention block sparse. dense matrix.", "summary": "attention block"},
    {"document": "gradient layer token window " * 20, "summary": "gradient layer"},
    {"document": "dense matrix memory", "summary": "dense memory " * 20},
    {"document": "", "summary": "window"},
    {"document": "caf\u00e9 \u0000 window", "summary": ""},
]


def _arguments(**changes):
    return [f"--{name}={value}" for name, value in {**TINY, **changes}.items()]


def _run(*arguments):
    """Runs the command in this process and puts every flag back."""
    with flagsaver.flagsaver():
        flags.FLAGS(["run_summarization", *arguments])
        run_summarization.main([])


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """A directory of JSONL files, one a split."""
    directory = tmp_path_factory.mktemp("data")
    for split in ("train", "validation"):
        lines = "".join(json.dumps(pair) + "\n" for pair in PAIRS)
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
            input_file=data_dir / "validation.jsonl",
        ),
        "--validation_split=validation",
        "--do_eval",
        "--do_export",
        "--do_predict",
    )
    return output_dir


def _lines(path):
    return [json.loads(line) for line in path.open()]


def test_evaluation_tells_the_loss_and_rouge_of_every_example_beside_the_baseline(finished_run):
    results = json.loads((finished_run / "eval_results_3.json").read_text())
    assert results["global_step"] == 3 and results["rouge_examples"] == len(PAIRS)
    assert results["loss"] > 0 and results["cross_entropy"] > 0
    for kind in ("rouge1", "rouge2", "rougeL", "rougeLsum"):
        for name in (kind, f"lead3_{kind}"):
            assert 0 <= results[f"{name}_low"] <= results[name] <= results[f"{name}_high"] <= 1
    assert results["lead3_rouge1"] > 0
    lines = (finished_run / "eval_results_3.txt").read_text().splitlines()
    assert f"lead3_rouge1 = {results['lead3_rouge1']}" in lines


def test_validation_losses_follow_the_checkpoints(finished_run):
    rows = (finished_run / "validation.csv").read_text().splitlines()
    assert rows[0] == "step,loss,cross_entropy"
    assert [row.split(",")[0] for row in rows[1:]] == ["2", "3"]
    results = json.loads((finished_run / "eval_results_3.json").read_text())
    np.testing.assert_allclose(float(rows[-1].split(",")[1]), results["loss"], rtol=1e-6)


def test_every_document_is_summarised_in_order_the_empty_one_too(finished_run):
    predictions = _lines(finished_run / "predictions.jsonl")
    assert [line["index"] for line in predictions] == list(range(len(PAIRS)))
    assert predictions == _lines(finished_run / "eval_summaries_3.jsonl")
    assert all(line["summary"] for line in predictions)


def test_a_prediction_that_was_cut_off_goes_on_without_repeating_the_flags_of_the_run(
    finished_run, data_dir, monkeypatch
):
    output_file = finished_run / "cut.jsonl"
    before = (finished_run / "train.csv").read_text()
    arguments = (
        "--do_train=False",
        "--do_predict",
        f"--output_dir={finished_run}",
        f"--input_file={data_dir / 'validation.jsonl'}",
        f"--output_file={output_file}",
        "--beam_size=2",
        "--forced_first_ids=90",
        "--eval_batch_size=2",
    )
    serve, served = ServedSummarizer.serve, []

    def fail_at_the_second_batch(self, document):
        served.append(document)
        if len(served) == 2:
            raise KeyboardInterrupt
        return serve.python_function(self, document)

    monkeypatch.setattr(ServedSummarizer, "serve", fail_at_the_second_batch)
    with pytest.raises(KeyboardInterrupt):
        _run(*arguments)
    assert not output_file.exists()
    _run(*arguments)
    # The first batch once, the second twice, the third once.
    assert [len(document) for document in served] == [2, 2, 2, 1]
    assert output_file.read_bytes() == (finished_run / "predictions.jsonl").read_bytes()
    assert (finished_run / "train.csv").read_text() == before


def test_rouge_of_the_first_batches_alone_where_asked_for(finished_run, data_dir):
    results_file = finished_run / "eval_results_3.json"
    before = json.loads(results_file.read_text())
    _run(
        "--do_train=False",
        "--do_eval",
        f"--output_dir={finished_run}",
        f"--data_dir={data_dir}",
        "--max_eval_steps=1",
        "--eval_batch_size=2",
        "--beam_size=1",
    )
    results = json.loads(results_file.read_text())
    assert results["rouge_examples"] == 2
    np.testing.assert_allclose(results["loss"], before["loss"], rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_size": 9}, "hidden_size=9"),
        ({"vocab_model_file": "nowhere.model"}, "vocab_model_file=nowhere.model"),
        ({"data_dir": "nowhere"}, "data_dir=nowhere"),
        ({"num_train_steps": 0}, "num_train_steps=0"),
        ({"num_warmup_steps": 0}, "num_warmup_steps=0"),
        ({"label_smoothing": 1}, "label_smoothing"),
        ({"max_decoder_length": 1}, "max_decoder_length=1"),
        ({"max_decoder_length": 5000}, "max_decoder_length=5000"),
        ({"min_length": 9}, "min_length=9 is above max_length=8"),
        ({"beam_size": 1000}, "beam_size=1000 is above"),
        ({"beam_size": 0}, "beam_size=0"),
        ({"sample": True}, "sample=True with beam_size=2"),
        ({"forced_first_ids": "7,900"}, "forced_first_ids[1]=900"),
        ({"forced_first_ids": "7,x"}, "forced_first_ids"),
        ({"eos_id": 5}, "set --eos_id=1"),
        ({"eval_split": "dev", "do_eval": True}, "none of the split dev"),
        ({"lead_sentences": 0, "do_eval": True}, "lead_sentences=0"),
        ({"max_eval_steps": -1, "do_eval": True}, "max_eval_steps=-1"),
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


def test_the_2021_input_function_gives_ids_of_documents_and_summaries(data_dir, vocabulary_file):
    with flagsaver.flagsaver():
        flags.FLAGS(["run_summarization"])
        input_fn = run_summarization.input_fn_builder(
            str(data_dir), vocabulary_file, 16, 6, " ", True
        )
        for documents, summaries in input_fn({"batch_size": 2}).take(3):
            assert documents.shape == [2, 16] and documents.dtype == tf.int32
            assert summaries.shape == [2, 6] and summaries.dtype == tf.int32


def test_flags_have_their_2021_defaults():
    expected = {
        "data_dir": "tfds://scientific_papers/pubmed",
        "output_dir": "/tmp/bigb",
        "init_checkpoint": None,
        "max_encoder_length": 128,
        "max_decoder_length": 128,
        "substitute_newline": None,
        "do_train": True,
        "do_eval": False,
        "do_export": False,
        "train_batch_size": 8,
        "eval_batch_size": 8,
        "optimizer": "Adafactor",
        "learning_rate": 0.32,
        "num_train_steps": 1000,
        "num_warmup_steps": 100,
        "save_checkpoints_steps": 2000,
        "max_eval_steps": 100,
        "couple_encoder_decoder": False,
        "beam_size": 5,
        "alpha": 0.8,
        "label_smoothing": 0.1,
    }
    with flagsaver.flagsaver():
        # Other tasks give other defaults to some: the task imported last decides.
        importlib.reload(run_summarization)
        assert {name: flags.FLAGS[name].default for name in expected} == expected


def _script(name, *arguments, **environment):
    """Returns the flags that a script would give to its command."""
    result = subprocess.run(
        [FOLDER / name, *arguments],
        env={"PATH": "/usr/bin:/bin", "PYTHON": "echo", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.startswith("-m bigbird.summarization.run_summarization ")
    return result.stdout.split()[2:]


def test_pegasus_large_has_the_2021_settings():
    given = _script("pegasus_large.sh")
    for flag in (
        "--max_encoder_length=3072",
        "--max_decoder_length=256",
        "--block_size=64",
        "--num_hidden_layers=16",
        "--hidden_size=1024",
        "--num_attention_heads=16",
        "--intermediate_size=4096",
        "--norm_type=prenorm",
        "--hidden_act=relu",
        "--use_bias=False",
        "--rescale_embedding=True",
        "--substitute_newline=<n>",
        "--scope=pegasus",
        "--vocab_model_file=pegasus",
        "--beam_size=5",
        "--alpha=0.8",
        "--label_smoothing=0.1",
        "--optimizer=Adafactor",
        "--learning_rate=0.32",
    ):
        assert flag in given


def test_roberta_base_shares_weights_and_has_base_sizes():
    given = _script("roberta_base.sh")
    for flag in (
        "--couple_encoder_decoder=True",
        "--norm_type=postnorm",
        "--hidden_act=gelu",
        "--use_bias=True",
        "--rescale_embedding=False",
        "--num_hidden_layers=12",
        "--hidden_size=768",
        "--vocab_model_file=gpt2",
        "--scope=bert",
        "--max_encoder_length=3072",
    ):
        assert flag in given


def test_settings_of_a_script_can_be_overridden():
    given = _script("pubmed_small.sh", "--hidden_size=8", HIDDEN_SIZE="4", INIT_CHECKPOINT="c/m")
    assert given.index("--hidden_size=4") < given.index("--hidden_size=8")
    assert "--init_checkpoint=c/m" in given


def _execute(name, monkeypatch, **environment):
    """Runs a notebook in its fast mode; returns what it printed."""
    for variable, value in {"FAST": "1", **environment}.items():
        monkeypatch.setenv(variable, str(value))
    notebook = nbformat.read(FOLDER / name, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    return "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])
    )


def test_the_training_notebook_runs(data_dir, vocabulary_file, monkeypatch):
    printed = _execute(
        "pubmed.ipynb", monkeypatch, DATA_DIR=data_dir, VOCAB_MODEL_FILE=vocabulary_file
    )
    assert "parameters in" in printed and "nats per token" in printed and "written: " in printed


def test_the_evaluation_notebook_gives_the_same_summaries_from_the_export(
    data_dir, finished_run, monkeypatch
):
    printed = _execute("eval.ipynb", monkeypatch, DATA_DIR=data_dir, EXPORT=finished_run / "export")
    assert f"written: {_lines(finished_run / 'predictions.jsonl')[0]['summary']}\n" in printed
    assert "model  rouge1" in printed and "lead-3  rouge1" in printed
