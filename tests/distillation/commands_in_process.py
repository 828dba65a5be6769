"""Runs commands in this process, with flags as on a command line; a tiny teacher and documents."""

import json

import tf_keras
from absl.testing import flagsaver

from bigbird.core import flags
from bigbird.core.checkpoint import save_safetensors
from bigbird.core.config import BigBirdConfig
from bigbird.core.vocabulary import vocabulary_size
from bigbird.distillation.toolkit_models import new_model

TEXTS = ["attention block sparse dense", "gradient layer token", "memory window " * 9, "matrix"]
MODEL = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def run(main, settings, *arguments, **changes):
    """Runs a command's `main` and puts every flag back."""
    given = [f"--{name}={value}" for name, value in {**settings, **changes}.items()]
    with flagsaver.flagsaver():
        rest = flags.FLAGS(["command", *given, *arguments])
        main(rest)


def write_teacher(directory, vocabulary_file):
    """Writes a masked language model in Hugging Face's layout, which describes itself."""
    tf_keras.utils.set_random_seed(3)
    size = vocabulary_size(vocabulary_file)
    config = BigBirdConfig(vocab_size=size, max_encoder_length=64, **MODEL)
    bert, predictions = new_model("masked_lm", config).modules
    save_safetensors(bert, str(directory), {"masked_lm": predictions})


def write_documents(directory):
    """Writes a training and a validation split whose documents differ."""
    words = "attention block sparse dense matrix memory gradient layer token window".split()
    for split, shift in (("train", 0), ("validation", 5)):
        texts = [" ".join(words[n:] + words[: n - shift]) for n in range(9)]
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (directory / f"{split}.jsonl").write_text("".join(lines))
