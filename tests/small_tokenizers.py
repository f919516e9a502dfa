# SPDX-License-Identifier: Apache-2.0
"""Tokenizers made on the spot: byte-level BPE, byte fallback, word starts, and characters."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from moe_lora.engine.text import text

TEXTS = ["the quick brown fox jumps over the lazy dog, naïve café 日本語", "hello world, hello there 🙂"]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}{% if m.name is defined %} {{ m.name }}{% endif %}]{{ m.content }}\n"
    "{% endfor %}{% if loud %}LOUD {% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_level() -> Tokenizer:
    """BPE over bytes, as GPT-2, Llama 3 and Qwen have it; some tokens hold parts of a character."""
    return Tokenizer.from_str(_trained())


@cache
def _trained() -> str:
    """The tokenizer of `byte_level` as JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer.to_str()


def byte_fallback() -> Tokenizer:
    """Word starts marked by ▁ and <0xXX> tokens for unknown characters, as Llama 2 and Mixtral have it."""
    words = ["▁the", "▁quick", "▁fox", "▁", "the", "ing", "日", "é", "a", "b"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    vocab.update({word: 259 + index for index, word in enumerate(words)})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer


def characters() -> Tokenizer:
    """One token per character; a leading <s> on every text."""
    letters = ["<pad>", "<s>", "</s>", *sorted(set("".join(TEXTS)))]
    tokenizer = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(letters)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def wrapped(backend: Tokenizer) -> text.Tokenizer:
    return text.Tokenizer(
        backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, chat_template=TEMPLATE
    )


def write_dir(folder: Path, backend: Tokenizer, **tokenizer_config: object) -> Path:
    """A model directory's tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **tokenizer_config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
