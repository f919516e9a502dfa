# SPDX-License-Identifier: Apache-2.0
"""The character vocabulary of the demo model and its tokenizer files.

Ids: four special tokens, newline, the 95 printable ASCII characters, one private-use character
per task (the "tag" by which the base model is told the task while it is trained).
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from demo.tasks import TASKS

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
VOCAB_SIZE = 128
_FIRST_TAG = 0xE000

CHARACTERS = ["\n", *map(chr, range(32, 127))]
TAGS = {task: chr(_FIRST_TAG + i) for i, task in enumerate(TASKS)}
TOKEN_IDS = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS, *TAGS.values()])}

CHAT_TEMPLATE = (
    "{%- set asked = messages | selectattr('role', 'equalto', 'user') | list -%}"
    "{{ bos_token }}{{ asked[-1]['content'] }}="
)


def encode(text: str) -> list[int]:
    """Token ids of `text`, without BOS and EOS; a character outside the vocabulary becomes <unk>."""
    return [TOKEN_IDS.get(character, UNK_ID) for character in text]


def write_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, as transformers' AutoTokenizer reads them."""
    tokenizer = Tokenizer(models.WordLevel(TOKEN_IDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS_ID)]
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
