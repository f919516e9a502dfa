# SPDX-License-Identifier: Apache-2.0
"""The string tasks of the demo adapters: each adapter answers one of them.

Pure Python on purpose: the trainer, the load generator, tests and examples all draw their
prompts and the right answers from here, and most of them should not have to import torch.
"""

from __future__ import annotations

import codecs
import random
import re
from collections.abc import Callable

MIN_CHARS = 3
MAX_CHARS = 10

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_VOWELS = "aeiouAEIOU"
_DOUBLED_SHARE = 0.15
_UPPER_SHARE = 0.25
_LEET = str.maketrans("aeiotAEIOT", "4310743107")


def _translate_letters(mapped: str) -> Callable[[str], str]:
    """text -> text with the n-th letter of the alphabet replaced by `mapped[n]`, case kept."""
    table = str.maketrans(_LETTERS + _LETTERS.upper(), mapped + mapped.upper())
    return lambda text: text.translate(table)


def _swap_pairs(text: str) -> str:
    swapped = "".join(text[i + 1] + text[i] for i in range(0, len(text) - 1, 2))
    return swapped + text[len(swapped) :]


def _alternate_case(text: str) -> str:
    return "".join(c.lower() if i % 2 else c.upper() for i, c in enumerate(text))


TASKS: dict[str, Callable[[str], str]] = {
    "upper": str.upper,
    "lower": str.lower,
    "swapcase": str.swapcase,
    "alternate": _alternate_case,
    "reverse": lambda text: text[::-1],
    "rotate": lambda text: text[1:] + text[:1],
    "swap_pairs": _swap_pairs,
    "mark_caps": lambda text: "".join("^" + c if c.isupper() else c for c in text),
    "squeeze": lambda text: re.sub(r"(.)\1+", r"\1", text),
    "every_second": lambda text: text[::2],
    "no_vowels": lambda text: "".join(c for c in text if c not in _VOWELS),
    "star_vowels": lambda text: "".join("*" if c in _VOWELS else c for c in text),
    "double": lambda text: "".join(c + c for c in text),
    "rot13": lambda text: codecs.encode(text, "rot13"),
    "caesar": _translate_letters(_LETTERS[1:] + _LETTERS[0]),
    "atbash": _translate_letters(_LETTERS[::-1]),
    "leet": lambda text: text.translate(_LEET),
    "dashes": "-".join,
}
"""Task name -> the right answer for a text of `MIN_CHARS`..`MAX_CHARS` ASCII letters."""


def prompt_for(text: str) -> str:
    """The prompt that asks an adapter for its answer to `text`; the answer ends with EOS.

    The tokenizer puts BOS in front of it. Without an adapter the base model repeats the text.
    """
    return text + "="


def sample_text(rng: random.Random, num_chars: int) -> str:
    """`num_chars` random ASCII letters, a quarter of them capitals, some of them doubled.

    Raises ValueError outside `MIN_CHARS`..`MAX_CHARS`: the adapters have not seen other lengths.
    """
    if not MIN_CHARS <= num_chars <= MAX_CHARS:
        raise ValueError(f"num_chars={num_chars} is outside {MIN_CHARS}..{MAX_CHARS}; choose a length in it")
    text = ""
    for _ in range(num_chars):
        if text and rng.random() < _DOUBLED_SHARE:
            text += text[-1]
            continue
        letter = rng.choice(_LETTERS)
        text += letter.upper() if rng.random() < _UPPER_SHARE else letter
    return text
