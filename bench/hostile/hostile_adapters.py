# SPDX-License-Identifier: Apache-2.0
"""Hostile adapter folders, drawn from a seed: lying headers, costly or leaking configs.

Each is a good adapter with a few changes, with zeros as values, to take no room.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Pairs = list[tuple[str, Any]]
"""A JSON object, possibly with doubled names."""
EDGES: tuple[Any, ...] = (
    *(0, 1, -1, 4, 8, 2**31, 2**63, -(2**63) - 1, 10**30, 10**400, 0.5, 1e308, float("nan"), True, None),
    *("", "4", "\ud800", "\0", "a\nb", "x" * 100_000, [], {}, [[]], [0] * 10_000),
)


def lying_headers(good: Path, to: Path, num: int, seed: int = 0) -> Iterator[Path]:
    """Writes `num` folders below `to`: the adapter in `good` with a changed header."""
    rng = random.Random(seed)
    header, num_bytes = _header(good)
    config = (good / CONFIG).read_bytes()
    for number in range(num):
        pairs: Pairs = list(json.loads(json.dumps(header)).items())
        for _ in range(rng.randint(1, 3)):
            rng.choice(_HEADER_CHANGES)(pairs, rng)
        text = _mangled(_object(pairs), rng) if rng.random() < 0.3 else _object(pairs)
        folder = _folder(to / f"header-{number}", config)
        _write_weights(folder / WEIGHTS, text, num_bytes, rng)
        yield folder


def hostile_configs(good: Path, to: Path, num: int, seed: int = 0) -> Iterator[Path]:
    """Writes `num` folders below `to`: the adapter in `good` with a changed config."""
    rng = random.Random(seed)
    header, num_bytes = _header(good)
    fields = json.loads((good / CONFIG).read_text())
    pipe = to / "base-with-a-pipe"
    pipe.mkdir()
    os.mkfifo(pipe / "config.json")
    values = {**_VALUES, "base_model_name_or_path": (*_BASES, str(pipe))}
    for number in range(num):
        pairs: Pairs = list(fields.items())
        for _ in range(rng.randint(1, 3)):
            key = rng.choice(sorted(values))
            given = rng.choice(values[key]) if rng.random() < 0.7 else rng.choice(EDGES)
            if rng.random() < 0.9:
                pairs = [one for one in pairs if one[0] != key]
            pairs.append((key, given))
        text = _object(pairs)
        folder = _folder(to / f"config-{number}", _mangled(text, rng) if rng.random() < 0.2 else text)
        _write_zeros(folder / WEIGHTS, json.dumps(header).encode(), num_bytes)
        yield folder


def _header(good: Path) -> tuple[dict[str, Any], int]:
    """An adapter's header, and how many bytes follow it."""
    content = (good / WEIGHTS).read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), len(content) - 8 - length


def _folder(path: Path, config: bytes) -> Path:
    path.mkdir()
    (path / CONFIG).write_bytes(config)
    return path


def _object(pairs: Pairs) -> bytes:
    return ("{" + ",".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in pairs) + "}").encode()


def _write_weights(path: Path, header: bytes, num_bytes: int, rng: random.Random) -> None:
    """By the header or not: another length of header or file, or no file at all."""
    kind = rng.random()
    if kind < 0.03:
        os.mkfifo(path)
    elif kind < 0.06:
        path.symlink_to(rng.choice(("/dev/zero", "/etc/passwd", "/nothing", path.name, "..")))
    else:
        said = rng.choice((0, 1, len(header) - 1, len(header) + 1, 10**8, 2**63, 2**64 - 1))
        more = rng.choice((-1, 1, -512, 1 << 32))
        _write_zeros(
            path,
            header,
            max(0, num_bytes + (more if 0.1 < kind < 0.25 else 0)),
            said if kind > 0.85 else None,
        )


def _write_zeros(path: Path, header: bytes, num_bytes: int, said: int | None = None) -> None:
    """said: the header's length in the file; None: the true length."""
    path.write_bytes((len(header) if said is None else said).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + num_bytes)  # sparse


def _mangled(text: bytes, rng: random.Random) -> bytes:
    """Invalid or bloated JSON."""
    place = rng.randrange(len(text))
    before, after = text[:place], text[place:]
    return rng.choice(
        (
            before,
            before + bytes([rng.randrange(256)]) + after[1:],
            before + b"[" * 100_000 + after,
            before + b"\xff\xfe" + after,
            before + b"9" * 5000 + after,
            text + b" " * 5_000_000,
            text[:-1] + b',"a":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
        )
    )


def _one_value(pairs: Pairs, rng: random.Random) -> None:
    place = rng.randrange(len(pairs))
    name, entry = pairs[place]
    if isinstance(entry, dict):
        field = rng.choice(("dtype", "shape", "data_offsets", "strides", "x" * 100_000))
        values = (rng.choice(EDGES), [rng.choice(EDGES) for _ in range(rng.randint(1, 3))], "F4", "I8", "F64")
        pairs[place] = name, {**entry, field: rng.choice(values)}


def _twice(pairs: Pairs, rng: random.Random) -> None:
    pairs.append(rng.choice(pairs))


def _exchanged(pairs: Pairs, rng: random.Random) -> None:
    first, second = rng.randrange(len(pairs)), rng.randrange(len(pairs))
    (name, entry), (other, its_entry) = pairs[first], pairs[second]
    pairs[first], pairs[second] = (name, its_entry), (other, entry)


def _renamed(pairs: Pairs, rng: random.Random) -> None:
    place = rng.randrange(len(pairs))
    pairs[place] = rng.choice(_NAMES), pairs[place][1]


def _left_out(pairs: Pairs, rng: random.Random) -> None:
    if len(pairs) > 1:
        del pairs[rng.randrange(len(pairs))]


def _many_more(pairs: Pairs, rng: random.Random) -> None:
    pairs += [
        (f"t{number}", {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}) for number in range(2000)
    ]


def _metadata(pairs: Pairs, rng: random.Random) -> None:
    pairs.append(("__metadata__", rng.choice(({"format": "pt" * 100_000}, {"a": [1]}, *EDGES))))


_HEADER_CHANGES: tuple[Callable[[Pairs, random.Random], None], ...] = (
    *(_one_value, _one_value, _one_value, _twice, _exchanged, _renamed, _left_out, _many_more, _metadata),
)
_LAYER = "base_model.model.model.layers."
_NAMES = (
    *("", "x", "x" * 400, "x" * 100_000, "a\nb.lora_A.weight", "__metadata__", "lm_head.weight"),
    *("model.embed_tokens.lora_embedding_A", _LAYER + "0.self_attn.q_proj.lora_A.bias"),
    *(_LAYER + f"{layer}.self_attn.q_proj.lora_A.weight" for layer in (-1, 99, 10**30, "9" * 5000)),
    _LAYER + "0.self_attn.q_proj" + ".base_layer" * 30 + ".lora_A.weight",
)


_EXPRESSIONS = (
    *(
        "(.|..)+(?<![a-z])",
        "(a{1000}){1000}",
        "(a*)*b",
        "(" * 500 + ")" * 500,
        "a{" + "9" * 5000 + "}",
        "(?i)x",
    ),
    *(
        "(?:" + "|".join(f"x{n}" for n in range(2000)) + ")",
        "(la)?yers",
        "[",
        "(?P<a>.)(?P<a>.)",
        "\\1",
        ".*",
    ),
)
_MANY_NAMES = [f"x{number}" for number in range(100_000)]
_MANY_PATTERNS: dict[str, Any] = {f"(?:a{{80}}){{80}}{number}": 4 for number in range(1000)}
_VALUES: dict[str, tuple[Any, ...]] = {
    "r": (10**6, 10**6 + 1, 3),
    "lora_alpha": (1e7, -1e7, 1e-300),
    "peft_type": ("LOHA", "lora"),
    "rank_pattern": (
        _MANY_PATTERNS,
        {f"q{number}": 4 for number in range(3000)},
        *({one: 4} for one in _EXPRESSIONS),
    ),
    "alpha_pattern": (_MANY_PATTERNS, *({one: 4} for one in _EXPRESSIONS)),
    "target_modules": (_MANY_NAMES, _MANY_NAMES[:5000], "all-linear", *_EXPRESSIONS),
    "target_parameters": (_MANY_NAMES, ["experts.gate_up_proj"], ["x" * 100_000]),
    "exclude_modules": (_MANY_NAMES, ["q_proj"], *_EXPRESSIONS),
    "layers_to_transform": (list(range(100_000)), [k * (2**61 - 1) for k in range(5000)], [-1], 0, ["0"]),
    "layers_pattern": (["x"] * 3000, ["x" * 1000] * 50, *([one] for one in _EXPRESSIONS)),
    "lora_B_layout": ("mixed", "x" * 100_000, [["rank_major"]]),
    "unsloth_fused_expert_lora": ({"parameters": []}, {"x" * 100_000: 1}, "x" * 100_000),
    "modules_to_save": (["lm_head"], "x" * 100_000),
    "x" * 100_000: (1,),
    "use_dora": (True, "x" * 100_000),
}
_BASES = (
    "/",
    "/etc",
    "/proc/self",
    "/dev/fd",
    "..",
    "a/" * 500_000,
    "x" * 1_000_000,
    "\0",
    "org/x-bnb-4bit\nINFO",
)
