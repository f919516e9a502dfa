# SPDX-License-Identifier: Apache-2.0
"""Time between the tokens of streams over HTTP, within a JSON schema and without.

    python -m bench.serve.bench_masks [--quantize int4] [--streams 16] [--out FILE]

One server of a random Llama of 453 million weights with a vocabulary of 151,936 made-up tokens.  By turns the
same streams run with a grammar and without, at the same temperature and seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.harness.interleave import interleave, ratio
from bench.harness.random_model import TINY, write_model
from bench.harness.records import ROOT, Recorder
from bench.quantised.bench_quantised import LLAMA

from .bench_decode import seconds
from .served_tree import ServedTree

SIZE = replace(LLAMA, num_layers=9, vocab_size=151_936)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        "home": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "pattern": "^[A-Z][a-z]*$"},
                "zip": {"type": "integer"},
            },
            "required": ["city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 4096}
"""Longer than any answer."""
_SPECIAL = ("<unk>", "<s>", "</s>")
_LETTERS = "etaoinshrdlucmfwypvbgkqjxz"
MAX_TOKEN_CHARS = 12


def write_tokenizer(folder: Path, vocab_size: int, seed: int = 0) -> None:
    """Write a byte-level BPE whose further tokens join two tokens, mostly of letters."""
    rng = random.Random(seed)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*_SPECIAL, *alphabet]
    known, merges = set(tokens), []
    pool = [*(_LETTERS * 8), *alphabet]
    while len(tokens) < vocab_size:
        left, right = rng.choice(pool), rng.choice(pool)
        joined = left + right
        if joined not in known and len(joined) <= MAX_TOKEN_CHARS:
            known.add(joined)
            tokens.append(joined)
            pool.append(joined)
            merges.append((left, right))
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(_SPECIAL))
    made.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quantize", default="int4")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round, to see that it runs")
    parser.add_argument("--out", help="append records here")
    options = parser.parse_args()
    size, rounds = (SIZE, options.rounds)
    if options.quick:
        size = replace(TINY, num_experts=0, hidden_size=64, intermediate_size=64, vocab_size=1024)
        rounds = 1
    record = Recorder(options.out)
    loads = [os.getloadavg()[0]]
    schema = {"type": "json_schema", "json_schema": {"name": "people", "schema": SCHEMA}}
    bodies: dict[str, dict[str, Any]] = {"plain": {}, "grammar": {"response_format": schema}}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", size)
        write_tokenizer(model, size.vocab_size)
        words = (str(model), "--quantize", options.quantize, "--max-num-seqs", str(options.streams))
        with ServedTree(ROOT, sys.executable, *words, "--max-model-len", "512") as server:
            contestants: dict[Any, Any] = {}
            for name, fields in bodies.items():
                fields |= {"temperature": 1.0, "seed": 1}
                run = partial(seconds, server, size.vocab_size, options.streams, fields=fields)
                run(options.steps)
                contestants[name] = (run, options.steps, rounds)
            times = interleave(contestants, rounds)
    loads.append(os.getloadavg()[0])
    result: dict[str, Any] = {
        "ms_per_token": {name: 1e3 * statistics.median(one) for name, one in times.items()},
        "ms_per_token_rounds": {name: [1e3 * each for each in one] for name, one in times.items()},
        "grammar_over_plain": ratio(times["grammar"], times["plain"]),
        "load_average": loads,
    }
    print(json.dumps(result))
    config = {"bench": "serve_masks", "model": size.describe(), "quantize": options.quantize}
    record({**config, "streams": options.streams, "steps": options.steps, "schema": SCHEMA}, result)


if __name__ == "__main__":
    main()
