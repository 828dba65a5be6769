"""Benchmark of checkpoints: a base-size model in Hugging Face's layout is loaded, served, exported.

    python -m benchmarks.bench_checkpoint      # about two minutes

The checkpoint has random weights. Baselines of the same run: the library's own reader, which gives
arrays and no model, and a model that is made with random weights and loads nothing.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import safetensors.numpy
import tensorflow as tf

from benchmarks import harness
from bigbird.classifier.run_classifier import BertClassifier, ServedClassifier
from bigbird.core.checkpoint import config_from_pretrained, load_safetensors, save_safetensors
from bigbird.core.config import BigBirdConfig
from bigbird.core.data import encode_documents
from bigbird.core.modeling import BertModel
from bigbird.core.training import export_saved_model
from bigbird.core.vocabulary import SpecialTokens, Tokenizer, find_vocabulary

CONFIG = BigBirdConfig(
    block_size=64, max_encoder_length=4096, vocab_size=50358, pattern_length="input"
)
REPEATS = 3
TEXT = ["A long document " * 300]


def read_arrays(directory):
    """The library's reader: arrays by name."""
    tensors = safetensors.numpy.load_file(os.path.join(directory, "model.safetensors"))
    return tf.constant(sum(tensor.size for tensor in tensors.values()))


def make_model(directory):
    """A model with its initial weights."""
    return BertModel(config_from_pretrained(directory)).pooler.bias.read_value()


def load_model(directory):
    """A model with the checkpoint's weights."""
    model = BertModel(config_from_pretrained(directory))
    load_safetensors(model, directory)
    return model.pooler.bias.read_value()


STEPS = {"read arrays": read_arrays, "make model": make_model, "make and load model": load_model}


def load_rows(directory, dtype, size):
    """Times and peak memory of the steps."""
    steps = {name: lambda step=step: step(directory) for name, step in STEPS.items()}
    timings = harness.measure_in_turn(steps, REPEATS)
    for name, timing in timings.items():
        peak = harness.peak_rss_in_fresh_process(__spec__.name, ["--child", name, directory])
        shape = f"base, {size / 2**20:.0f} MiB"
        yield harness.Row(name, "eager", shape, dtype, timing, peak_rss_bytes=peak)


def serve_rows(directory, work):
    """Times of the first and later classifications of a string, and of the export."""
    config = config_from_pretrained(directory)
    classifier = BertClassifier(config, 2)
    load_safetensors(classifier.bert, directory)
    tokenizer = Tokenizer(find_vocabulary("builtin"))

    def encode(text):
        return encode_documents(text, tokenizer, SpecialTokens(), config.max_encoder_length)

    served = ServedClassifier(classifier, encode)
    classify = {"classify a string": lambda: served.serve(tf.constant(TEXT))["probabilities"]}

    def export():
        export_saved_model(served, os.path.join(work, "export"))
        return tf.constant(0)

    timings = {
        **harness.measure_in_turn(classify, REPEATS),
        **harness.measure_in_turn({"export": export}, repeats=1, warmup=0),
    }
    for name, timing in timings.items():
        yield harness.Row(name, "graph", "base L=4096", "float32", timing)


def main():
    """Runs the benchmark, or one step of it in a child process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=2, metavar=("STEP", "DIRECTORY"))
    arguments = parser.parse_args()
    if arguments.child:
        step, directory = arguments.child
        harness.report_peak_rss(lambda: STEPS[step](directory), calls=1)
        return

    rows = []
    with tempfile.TemporaryDirectory() as work:
        model = BertModel(CONFIG)
        size = sum(4 * variable.shape.num_elements() for variable in model.variables)
        directories = {"F32": os.path.join(work, "f32"), "BF16": os.path.join(work, "bf16")}
        for code, directory in directories.items():
            save_safetensors(model, directory, type_code=code)
        del model
        for code, directory in directories.items():
            rows += load_rows(directory, {"F32": "float32", "BF16": "bfloat16"}[code], size)
        rows += serve_rows(directories["F32"], work)
    for row in rows:
        print(row, flush=True)
    harness.write_csv(harness.RESULTS / "checkpoint.csv", rows)


if __name__ == "__main__":
    main()
