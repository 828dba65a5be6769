"""Vocabularies: where SentencePiece models are found, and text to ids and back inside the graph."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib

import numpy as np
import sentencepiece
import tensorflow as tf
import tensorflow_text

from bigbird.core.corpora import builtin_documents

# Names of the 2021 toolkit's vocabularies, and where it keeps their files.
_NAMED = ("gpt2", "pegasus")
# How SentencePiece writes the blank before a word.
_WORD_MARK = "\u2581"
_HOME_OF_NAMED = "the folder bigbird/vocab of https://github.com/google-research/bigbird"


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """Ids with a meaning of their own; the defaults are those of the 2021 vocabularies."""

    pad: int = 0
    eos: int = 1
    bos: int = 2
    cls: int = 65
    sep: int = 66
    mask: int = 67

    def check(self, vocab_size: int, *names: str) -> None:
        """Checks that the vocabulary holds the named special ids.

        Raises:
          ValueError: for an id outside `[0, vocab_size)`.
        """
        for name in names:
            value = getattr(self, name)
            if not 0 <= value < vocab_size:
                raise ValueError(
                    f"The special id {name}={value} is not in the vocabulary, whose ids are 0 to "
                    f"{vocab_size - 1}: set --{name}_id to that vocabulary's id, or give another "
                    "--vocab_model_file."
                )


def find_vocabulary(vocab_model_file: str) -> str:
    """Returns the path of a vocabulary.

    Args:
      vocab_model_file: a path; `gpt2` or `pegasus`, looked up as `gpt2.model` in
        `$BIGBIRD_VOCAB_DIR` and then in the user cache (`~/.cache/bigbird/vocab`); or `builtin`,
        trained on the built-in documents when it is first asked for.

    Raises:
      ValueError: where there is no such file; the message says how to get it.
    """
    if vocab_model_file == "builtin":
        return str(builtin_documents.prepare() / builtin_documents.VOCABULARY_FILE)
    if vocab_model_file in _NAMED:
        return _find_named(vocab_model_file)
    if not tf.io.gfile.exists(vocab_model_file) or tf.io.gfile.isdir(vocab_model_file):
        raise ValueError(
            f"--vocab_model_file={vocab_model_file}: expected a SentencePiece model file, or one "
            f"of the names {', '.join(_NAMED)}, builtin; there is no such file."
        )
    return vocab_model_file


def vocabulary_size(path: str) -> int:
    """Returns the number of pieces of a SentencePiece model file.

    Raises:
      ValueError: where the file is no SentencePiece model.
    """
    return _parse(_read(path), path).get_piece_size()


def piece_id(path: str, piece: str) -> int:
    """Returns the id of a piece of a SentencePiece model file, such as `[CLS]`.

    Raises:
      ValueError: where the file is no SentencePiece model or has no such piece.
    """
    processor = _parse(_read(path), path)
    number = processor.piece_to_id(piece)
    if processor.id_to_piece(number) != piece:
        raise ValueError(f"{path} has no piece {piece}: give another --vocab_model_file.")
    return number


class Tokenizer:
    """A SentencePiece vocabulary as TensorFlow operations; they can be part of a SavedModel.

    Attributes:
      vocab_size: number of pieces V; ids are 0 to V - 1.
    """

    def __init__(self, path: str):
        """Reads the SentencePiece model file at `path`.

        Raises:
          ValueError: where the file is no SentencePiece model.
        """
        self._model = _read(path)
        processor = _parse(self._model, path)
        self.vocab_size = processor.get_piece_size()
        self._path = path
        self._eos_id = processor.eos_id()

    def tokenize(self, text) -> tf.RaggedTensor:
        """Strings `[B]` -> ids, int32 `[B, (length)]`. Any bytes are accepted."""
        return self._operations().tokenize(text)

    def detokenize(self, ids) -> tf.Tensor:
        """Ids `[B, (length)]` -> strings `[B]`; special ids give no text."""
        return self._operations().detokenize(ids)

    def fingerprint(self, pieces: int | None = None) -> str:
        """Tells vocabularies apart: a SHA-256 over the first `pieces` pieces, in order."""
        processor = _parse(self._model, self._path)
        digest = hashlib.sha256()
        for number in range(self.vocab_size if pieces is None else pieces):
            piece = processor.id_to_piece(number).encode()
            digest.update(len(piece).to_bytes(4, "little") + piece)
        return digest.hexdigest()

    def check_end_of_sequence(self, special: SpecialTokens) -> None:
        """Checks that the vocabulary declares the EOS id that decoding ends at.

        A piece of ordinary text in its place would end a text wherever it occurs.

        Raises:
          ValueError: where it declares another id or none.
        """
        if self._eos_id == special.eos:
            return
        if self._eos_id < 0:
            raise ValueError(
                f"{self._path} declares no end-of-sequence piece, which summaries need to end: "
                f"train the SentencePiece model with --eos_id={special.eos}, or give another "
                "--vocab_model_file."
            )
        raise ValueError(
            f"{self._path} declares {self._eos_id} as its end-of-sequence id, and --eos_id is "
            f"{special.eos}: set --eos_id={self._eos_id}."
        )

    def word_starts(self) -> np.ndarray:
        """Returns which pieces begin a word: boolean `[V]`."""
        processor = _parse(self._model, self._path)
        pieces = (processor.id_to_piece(i) for i in range(self.vocab_size))
        return np.array([piece.startswith(_WORD_MARK) for piece in pieces])

    def text_ids(self) -> np.ndarray:
        """Returns the ids of the pieces that stand for text, and not for bytes or control."""
        processor = _parse(self._model, self._path)
        kinds = (
            processor.is_control,
            processor.is_unknown,
            processor.is_unused,
            processor.is_byte,
        )
        ids = range(self.vocab_size)
        return np.array([i for i in ids if not any(kind(i) for kind in kinds)], np.int32)

    def _operations(self) -> tensorflow_text.SentencepieceTokenizer:
        # Made anew in every graph, which then owns the parsed model. One that is made eagerly
        # belongs to TensorFlow's kernel cache, and is gone after `tf.random.set_seed`.
        return tensorflow_text.SentencepieceTokenizer(self._model, out_type=tf.int32)


def _find_named(name: str) -> str:
    folders = [builtin_documents.user_cache() / "vocab"]
    if os.environ.get("BIGBIRD_VOCAB_DIR"):
        folders.insert(0, pathlib.Path(os.environ["BIGBIRD_VOCAB_DIR"]))
    candidates = [folder / f"{name}.model" for folder in folders]
    for path in candidates:
        if path.is_file():
            return str(path)
    raise ValueError(
        f"--vocab_model_file={name}: {name}.model was looked for at "
        f"{' and '.join(map(str, candidates))}. Get it from {_HOME_OF_NAMED} and put it there, "
        "set $BIGBIRD_VOCAB_DIR to its folder, or give a path; `builtin` needs no file."
    )


def _read(path: str) -> bytes:
    with tf.io.gfile.GFile(path, "rb") as file:
        return file.read()


def _parse(model: bytes, path: str) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except RuntimeError as error:
        raise ValueError(f"{path} is not a SentencePiece model: {error}") from error
    return processor
