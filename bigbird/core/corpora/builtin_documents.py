"""The built-in data set: long labelled documents made of the Python sources installed here.

Nothing is downloaded or shipped. Passages are cut from the sources of five subsystems that are on
every machine where this package runs. A document is eight passages: two from elsewhere open it, and
six of its label's subsystem follow. Its beginning thus does not say what it is about, and the whole
says it clearly: a model must read far to be right. The SentencePiece vocabulary `builtin` is
trained on the training documents. Both are made once and kept in the user cache.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import os
import pathlib
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import sentencepiece
from absl import logging

SPLITS = ("train", "validation", "test")
VOCABULARY_FILE = "vocabulary.model"
VOCABULARY_SIZE = 8000

# Part of the cache's key: raise it with every change to how documents or vocabulary are made.
_CONSTRUCTION = "construction 2"

_OPENING_PASSAGES = 2
_OWN_PASSAGES = 6
_PASSAGE_CHARACTERS = 1700
_LONGEST_PASSAGE = 3000
_PASSAGES_OF_A_FILE = 30
_TRAINING_CHARACTERS = 2_000_000

# Where a file's own text begins. What stands before (licence, module docstring, imports) is left
# out: it is boilerplate, and tells the subsystem at a glance.
_FIRST_DEFINITION = re.compile(r"^(?:@|def |class |async def )", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n\s*\n")


@dataclasses.dataclass(frozen=True)
class Subsystem:
    """A tree of Python sources whose passages bear one label.

    Attributes:
      label: the class name.
      root: the tree's top folder.
      skipped: names of folders left out.
    """

    label: str
    root: pathlib.Path
    skipped: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Passage:
    """A run of whole paragraphs of one source file."""

    file: str
    text: str

    def order(self) -> str:
        """A key that shuffles passages, always in the same way."""
        return digest(self.text)


def user_cache() -> pathlib.Path:
    """Returns this package's folder in the user cache: `$XDG_CACHE_HOME` or `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "bigbird"


def prepare() -> pathlib.Path:
    """Makes the documents and their vocabulary where the cache has none for what is installed.

    Returns:
      The folder of `train.jsonl`, `validation.jsonl`, `test.jsonl` (fields `text`, `label`,
      `files`) and `vocabulary.model`.
    """
    return make_once(_CONSTRUCTION, _write_documents_and_vocabulary)


def make_once(construction: str, write: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Returns the cache's folder of one built-in data set, made where it is missing.

    The folder appears when it is whole, whatever happens to this process or is done by another.

    Args:
      construction: names the data set and the version of how it is made.
      write: writes the data set into an empty folder.
    """
    key = repr([construction, *_installed_versions()])
    directory = user_cache() / "builtin" / digest(key)[:16]
    if directory.exists():
        return directory
    logging.info("Making built-in data in %s; this happens once.", directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = pathlib.Path(tempfile.mkdtemp(prefix=".making-", dir=directory.parent))
    try:
        write(temporary)
        _rename_unless_made(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return directory


def write_splits(directory: pathlib.Path, examples: Mapping[str, Sequence[dict]]) -> None:
    """Writes the examples of each split as `<split>.jsonl`."""
    for split, of_split in examples.items():
        lines = "".join(json.dumps(example) + "\n" for example in of_split)
        (directory / f"{split}.jsonl").write_text(lines, encoding="utf-8")


def installed_subsystems() -> list[Subsystem]:
    """Returns the source trees that the documents are made of, in the order of their labels."""
    return [
        Subsystem("keras", _package_root("keras") / "src"),
        Subsystem("matplotlib", _package_root("matplotlib")),
        Subsystem("numpy", _package_root("numpy")),
        # Left out of the standard library: what some systems package apart.
        Subsystem(
            "python",
            pathlib.Path(sysconfig.get_path("stdlib")),
            frozenset(
                "dist-packages distutils ensurepip idlelib lib2to3 pydoc_data site-packages test "
                "tests tkinter turtledemo venv".split()
            ),
        ),
        # TensorFlow's own old copy of Keras is neither clearly TensorFlow nor clearly Keras.
        Subsystem("tensorflow", _package_root("tensorflow") / "python", frozenset({"keras"})),
    ]


def make_documents(subsystems: Sequence[Subsystem]) -> dict[str, list[dict]]:
    """Makes the documents of every split; the same sources always give the same documents.

    A source file belongs to one split, by the hash of its path, and a passage to one document. The
    labels are equally frequent, and follow each other in turn.

    Args:
      subsystems: the labelled source trees.

    Returns:
      Split -> list of `{"text": str, "label": str, "files": [str]}`.
    """
    # By text: a passage that was copied into a second file is taken once.
    passages = {s.label: {p.text: p for p in _passages_of(s)}.values() for s in subsystems}
    return {
        split: _assemble(
            {
                label: [p for p in of_label if split_of(p.file) == split]
                for label, of_label in passages.items()
            }
        )
        for split in SPLITS
    }


def source_files(subsystem: Subsystem) -> Iterator[tuple[str, str]]:
    """Gives the name (`label/path`) and the text of every source file, always in one order."""
    for path in _source_paths(subsystem):
        try:
            source = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):  # another encoding declared, or a dangling link
            continue
        yield f"{subsystem.label}/{path.relative_to(subsystem.root).as_posix()}", source


def digest(text: str) -> str:
    """Returns the SHA-256 of a text in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def split_of(file: str) -> str:
    """Returns the split of a source file: 75 % train, 10 % validation, 15 % test."""
    percent = int(digest(file), 16) % 100
    return "train" if percent < 75 else "validation" if percent < 85 else "test"


def cut_passages(source: str) -> Iterator[str]:
    """Cuts a source file into runs of whole paragraphs of about 500 tokens.

    What stands before the first definition, the rest at the end and runs with a paragraph of
    extreme length (tables) are left out.
    """
    start = _FIRST_DEFINITION.search(source)
    if start is None:
        return
    run = ""
    for paragraph in _BLANK_LINES.split(source[start.start() :]):
        run = f"{run}\n\n{paragraph}" if run else paragraph
        if len(run) >= _PASSAGE_CHARACTERS:
            if len(run) <= _LONGEST_PASSAGE:
                yield run
            run = ""


def train_vocabulary(texts: Iterable[str], vocab_size: int = VOCABULARY_SIZE) -> bytes:
    """Trains a SentencePiece unigram model whose special ids are the 2021 vocabularies'.

    Args:
      texts: documents; as many as make up two million characters are read.
      vocab_size: number of pieces, of which the first 68 are special.

    Returns:
      The serialized model. Pad is 0, EOS 1, BOS 2, unknown 3, [CLS] 65, [SEP] 66, [MASK] 67.
    """
    reserved = [f"<reserved_{i}>" for i in range(4, 65)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=_training_lines(texts),
        model_writer=model,
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        control_symbols=[*reserved, "[CLS]", "[SEP]", "[MASK]"],
        # The sums of several threads depend on how many there are: fixed, the model is too.
        num_threads=2,
        minloglevel=2,
    )
    return model.getvalue()


def write_vocabulary(path: pathlib.Path, pieces: int) -> None:
    """Writes a vocabulary of the built-in documents of another size than theirs.

    Among thousands of pieces a teacher that trained for minutes is unsure. Of a vocabulary of 172
    pieces, 104 besides the special ones, its 100 likeliest hold nearly all the mass, as those of a
    large language model do of its own.
    """
    lines = (prepare() / "train.jsonl").read_text(encoding="utf-8").splitlines()
    vocabulary = train_vocabulary((json.loads(line)["text"] for line in lines), pieces)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(vocabulary)
    temporary.rename(path)


def _package_root(package: str) -> pathlib.Path:
    # Finds a top-level package without importing it.
    return pathlib.Path(importlib.util.find_spec(package).submodule_search_locations[0])


def _installed_versions() -> list[str]:
    packages = ("keras", "matplotlib", "numpy", "sentencepiece", "tensorflow")
    versions = [f"{package} {importlib.metadata.version(package)}" for package in packages]
    return [f"python {sys.version}", *versions]


def _passages_of(subsystem: Subsystem) -> Iterator[Passage]:
    for file, source in source_files(subsystem):
        for text in itertools.islice(cut_passages(source), _PASSAGES_OF_A_FILE):
            yield Passage(file, text)


def _source_paths(subsystem: Subsystem) -> Iterator[pathlib.Path]:
    for folder, subfolders, names in os.walk(subsystem.root):
        subfolders[:] = sorted(set(subfolders) - subsystem.skipped)
        for name in sorted(names):
            # TensorFlow's gen_*.py are written by a program: thousands of near-copies.
            if name.endswith(".py") and not name.startswith("gen_"):
                yield pathlib.Path(folder, name)


def _assemble(passages: dict[str, list[Passage]]) -> list[dict]:
    labels = list(passages)
    shuffled = {label: sorted(of_label, key=Passage.order) for label, of_label in passages.items()}
    # In a round of one document of each label, a label gives as many passages as a document holds.
    per_document = _OPENING_PASSAGES + _OWN_PASSAGES
    rounds = min(map(len, shuffled.values())) // per_document
    supply = {label: iter(of_label) for label, of_label in shuffled.items()}
    documents = []
    for round_, (index, label) in itertools.product(range(rounds), enumerate(labels)):
        others = labels[index + 1 :] + labels[:index]
        elsewhere = [others[(round_ + n) % len(others)] for n in range(_OPENING_PASSAGES)]
        parts = [next(supply[other]) for other in elsewhere]
        parts += itertools.islice(supply[label], _OWN_PASSAGES)
        documents.append(
            {
                "text": "\n\n".join(part.text for part in parts),
                "label": label,
                "files": [part.file for part in parts],
            }
        )
    return documents


def _training_lines(texts: Iterable[str]) -> Iterator[str]:
    characters = 0
    for line in itertools.chain.from_iterable(text.split("\n") for text in texts):
        characters += len(line)
        if characters > _TRAINING_CHARACTERS:
            return
        if line.strip():
            yield line


def _write_documents_and_vocabulary(directory: pathlib.Path):
    documents = make_documents(installed_subsystems())
    write_splits(directory, documents)
    vocabulary = train_vocabulary(document["text"] for document in documents["train"])
    (directory / VOCABULARY_FILE).write_bytes(vocabulary)


def _rename_unless_made(temporary: pathlib.Path, directory: pathlib.Path):
    try:
        temporary.rename(directory)
    except OSError:
        # Another process was faster: its files are the same.
        if not directory.exists():
            raise
