"""The built-in summarization set: documentation of the Python packages here, and its summary line.

Nothing is downloaded or shipped. An example is a module, class or function whose documentation is
long. By convention a docstring opens with one sentence that says what the rest explains: that
sentence is the summary; what follows it, with the documentation of the members of a module or
class, is the document. Made once and kept in the user cache.
"""

from __future__ import annotations

import ast
import pathlib
import re
import warnings
from collections.abc import Iterator, Sequence

from bigbird.core.corpora.builtin_documents import (
    SPLITS,
    Subsystem,
    digest,
    installed_subsystems,
    make_once,
    source_files,
    split_of,
    write_splits,
)

# Part of the cache's key: raise it with every change to how the examples are made.
_CONSTRUCTION = "summaries 1"

_SHORTEST_DOCUMENT = 1200  # characters, about 300 tokens
_SUMMARY_WORDS = range(5, 61)

_BLANK_LINES = re.compile(r"\n\s*\n")
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef


def prepare() -> pathlib.Path:
    """Makes the examples where the cache has none for what is installed.

    Returns:
      The folder of `train.jsonl`, `validation.jsonl` and `test.jsonl` (fields `document`,
      `summary`, `file`).
    """
    return make_once(
        _CONSTRUCTION,
        lambda directory: write_splits(directory, make_examples(installed_subsystems())),
    )


def make_examples(subsystems: Sequence[Subsystem]) -> dict[str, list[dict]]:
    """Makes the examples of every split; the same sources always give the same examples.

    A source file belongs to one split, by the hash of its path. A document, and a summary, is
    taken once: packages hold copies of themselves.

    Args:
      subsystems: the source trees.

    Returns:
      Split -> list of `{"document": str, "summary": str, "file": str}`, shuffled by a hash.
    """
    examples = {split: [] for split in SPLITS}
    seen = set()
    for subsystem in subsystems:
        for file, source in source_files(subsystem):
            for document, summary in documented(source):
                if not {document, summary} & seen:
                    seen |= {document, summary}
                    example = {"document": document, "summary": summary, "file": file}
                    examples[split_of(file)].append(example)
    for of_split in examples.values():
        of_split.sort(key=lambda example: digest(example["document"]))
    return examples


def documented(source: str) -> Iterator[tuple[str, str]]:
    """Gives (document, summary) of everything in a source file that is documented at length."""
    if '"""' not in source:
        return
    with warnings.catch_warnings():
        # Old files have invalid escapes in their strings.
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source)
        except SyntaxError:  # a template, or a test of the parser
            return
    yield from _documented_below(tree)


def _documented_below(node: _Documented) -> Iterator[tuple[str, str]]:
    opening, *rest = _BLANK_LINES.split(ast.get_docstring(node) or "", maxsplit=1)
    summary = " ".join(opening.split())
    document = "\n\n".join([*rest, *_member_texts(node)]).strip()
    if len(document) < _SHORTEST_DOCUMENT:
        # Then so are those of its members.
        return
    if summary.endswith(".") and len(summary.split()) in _SUMMARY_WORDS:
        yield document, summary
    for member in _members(node):
        yield from _documented_below(member)


def _member_texts(node: _Documented) -> Iterator[str]:
    for member in _members(node):
        if text := ast.get_docstring(member):
            yield f"{member.name}: {text}"
        yield from _member_texts(member)


def _members(node: _Documented) -> list[_Documented]:
    if isinstance(node, ast.FunctionDef):
        return []
    return [child for child in node.body if isinstance(child, ast.ClassDef | ast.FunctionDef)]
