"""Teachers and students by task: made from a config, or loaded from a checkpoint or a Keras file.

| task         | model                              | learns                                     |
| ------------ | ---------------------------------- | ------------------------------------------ |
| `masked_lm`  | `BertModel` with `MaskedLMLayer`   | the hidden words of a document             |
| `seq2seq`    | `TransformerModel`                 | the words of a summary, given those before |
| `next_token` | a `.keras` file                    | the next word                              |
"""

from __future__ import annotations

import importlib
import json
import zipfile

import tf_keras as keras

from bigbird.core.checkpoint import CheckpointError, LoadReport, load_initial_weights
from bigbird.core.config import BigBirdConfig
from bigbird.core.layers import create_initializer, get_activation
from bigbird.core.modeling import BertModel, TransformerModel
from bigbird.distillation.students import (
    LanguageModel,
    functional_model,
    masked_language_model,
    sequence_to_sequence_model,
)
from bigbird.pretrain.heads import MaskedLMLayer

TASKS = ("masked_lm", "seq2seq", "next_token")
# What row t of a teacher tells of; see `cache_format.ALIGNMENTS`.
ALIGNMENT_OF_TASK = {"masked_lm": "same", "seq2seq": "same", "next_token": "next"}


def new_model(task: str, config: BigBirdConfig) -> LanguageModel:
    """Makes a toolkit model with new weights.

    Raises:
      ValueError: for a task without a model in the toolkit.
    """
    if task == "seq2seq":
        return sequence_to_sequence_model(TransformerModel(config))
    if task == "masked_lm":
        bert = BertModel(config)
        # Hidden words do not reach it.
        bert.pooler.trainable = False
        predictions = MaskedLMLayer(
            config.hidden_size,
            config.vocab_size,
            bert.embeddings,
            create_initializer(config.initializer_range),
            get_activation(config.hidden_act),
            layer_norm_epsilon=config.layer_norm_epsilon,
        )
        return masked_language_model(bert, predictions)
    raise ValueError(
        f"The toolkit has no model for task={task!r}: give a .keras file, or one of the tasks "
        "masked_lm, seq2seq."
    )


def load_weights(model: LanguageModel, path: str, **options) -> LoadReport:
    """Loads a checkpoint of any kind into a `new_model`.

    Args:
      model: from `new_model`.
      path: as in `checkpoint.load_initial_weights`.
      **options: its `extend_positions` and `ignore_mismatched`.

    Raises:
      CheckpointError: for a path that is no checkpoint, or one that does not fit.
    """
    body, *heads = model.modules
    named = {"masked_lm": heads[0]} if heads else None
    return load_initial_weights(body, path, named, **options)


def load_teacher(task: str, config: BigBirdConfig, path: str) -> LanguageModel:
    """Makes a toolkit model with the weights of a checkpoint, all of them.

    Raises:
      ValueError: as `new_model` and `load_weights`, and where the checkpoint lacks a weight that
        the logits depend on.
    """
    model = new_model(task, config)
    report = load_weights(model, path)
    missing = [name for name in report.missing if "pooler" not in name]
    if missing:
        raise CheckpointError(
            f"init_checkpoint={path!r} lacks {len(missing)} weights of a {task} model, such as "
            f"{missing[0]}: a teacher with random weights has nothing to say."
        )
    return model


def load_keras_file(
    path: str, head_layer: str | None, hidden_layer: str | None, packed: bool = False
) -> LanguageModel:
    """Loads a functional model that tf_keras or Keras 3 saved as a `.keras` file.

    Args:
      path: the file.
      head_layer, hidden_layer: as in `functional_model`.
      packed: whether its inputs are `input_ids` and `document_ids`, or `input_ids` alone.

    Raises:
      ValueError: for a file that is none, or a model without such layers.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            version = json.loads(archive.read("metadata.json"))["keras_version"]
    except (OSError, zipfile.BadZipFile, KeyError, ValueError) as error:
        raise ValueError(f"{path} is no .keras file of a saved model: {error}") from error
    library = keras if version.startswith("2.") else importlib.import_module("keras")
    model = library.models.load_model(path, compile=False)
    names = ("input_ids", "document_ids") if packed else ("input_ids",)
    return functional_model(model, head_layer, hidden_layer=hidden_layer, input_names=names)
