# SPDX-License-Identifier: Apache-2.0
"""The prose of code and pages: words, relative words, pronouns, code blocks with output."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .sources import Source, children, is_text

LEAST_WORDS = 4
"""String literals with fewer words are names and keys, not sentences."""
_RELATIVE = frozenset(re.findall(r"\w+", "what which that who whom whose whoever whatever where whether"))
_PRONOUNS = frozenset(
    re.findall(
        r"\w+",
        "it its them they their one ones those these others other such so all each none nothing nobody "
        "everything everybody somebody",
    )
)
_WORD = re.compile(r"[a-z']+")
_SESSION = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
_GENERATED = re.compile(r"<!-- (?:settings|options|vllm|generated|docstrings): .*?<!-- end -->", re.DOTALL)


@dataclass(frozen=True)
class Prose:
    """Number of words, and relative words and pronouns per 1,000 words."""

    num_words: int
    relative_per_1000: float
    pronouns_per_1000: float


def count_prose(texts: Iterable[str]) -> Prose:
    words = [word for text in texts for word in _WORD.findall(text.lower())]
    shares = [
        1000 * sum(word in kind for word in words) / max(1, len(words)) for kind in (_RELATIVE, _PRONOUNS)
    ]
    return Prose(len(words), round(shares[0], 1), round(shares[1], 1))


def explanations(source: Source) -> list[str]:
    """Comments but the license's line, and docstrings; each statement of a string alone is a docstring."""
    texts = [node.value.value for node in source.nodes if is_text(node)]  # type: ignore[attr-defined]
    comments = [one.lstrip("# ") for one in source.lines_and_comments[1]]
    return texts + [comment for comment in comments if not comment.startswith("SPDX-")]


def sentences(source: Source) -> list[str]:
    """String literals of four words or more, without docstrings.

    The parts of an f-string or of a sum are one text.
    """
    return [text for text in _literals(source.tree) if len(_WORD.findall(text.lower())) >= LEAST_WORDS]


def _literals(node: ast.AST) -> Iterator[str]:
    if is_text(node):
        return
    text = _text(node)
    if text is not None:
        yield text
        return
    for inner in children(node):
        yield from _literals(inner)


def _text(node: ast.AST) -> str | None:
    """The text in an expression, with a gap for each value; None: no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(one) or " " for one in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return None if left is None and right is None else f"{left or ' '}{right or ' '}"
    return None


def pages(tree: Path) -> list[Path]:
    """The pages of docs, and the benches' page."""
    return [*sorted((tree / "docs").rglob("*.md")), tree / "bench" / "README.md"]


def page_prose(text: str) -> str:
    """A page without code and without generated tables."""
    return re.sub(r"`[^`]*`", " ", re.sub(r"```.*?```", " ", _GENERATED.sub(" ", text), flags=re.DOTALL))


@dataclass(frozen=True)
class Session:
    """A block of a page: commands and their output."""

    page: Path
    commands: tuple[str, ...]
    output: str
    start: int
    """The block's place in the text."""


def page_sessions(page: Path) -> list[Session]:
    """Blocks marked `console` with at least one line "$ COMMAND" and a line of output."""
    found = []
    for match in _SESSION.finditer(page.read_text(encoding="utf-8")):
        lines = match[1].splitlines()
        commands = tuple(line[2:] for line in lines if line.startswith("$ "))
        output = "\n".join(line for line in lines if not line.startswith("$ "))
        if commands and output.strip(" .\n"):
            found.append(Session(page, commands, output, match.start()))
    return found


def sessions(tree: Path) -> list[Session]:
    """The sessions of all pages.  A test calls this function and compares the output of each block."""
    return [one for page in [tree / "README.md", *pages(tree)] for one in page_sessions(page)]


def compared_blocks(tree: Path) -> int:
    """Number of `sessions`; 0 unless a test calls `sessions`."""
    tests = (path.read_text(encoding="utf-8") for path in sorted((tree / "tests").glob("test_*.py")))
    return len(sessions(tree)) if any(re.search(r"\bsessions\(", text) for text in tests) else 0
