# SPDX-License-Identifier: Apache-2.0
"""Random damage of adapters' files: refused by name, or the same adapter; never a different one."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_lora.adapters.peft.files import CONFIG_FILE, MLX_FILE, WEIGHTS_FILE
from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.core.errors import AdapterError
from moe_lora.core.wrong_files import read_config
from moe_lora.families import shape_of
from tests.adapters.peft.mlx_files import as_mlx
from tests.families import make_adapter, make_checkpoint
from tests.grids import with_quick
from tests.random_models import FAMILIES, random_adapter

pytestmark = pytest.mark.filterwarnings("ignore")
NUM_MANGLES = 40


def swapped(key):
    return re.sub("lora_([ABab])", lambda found: f"lora_{'BAba'['ABab'.index(found[1])]}", key)


def moved(key, pattern, rng):
    return re.sub(rf"{pattern}\.(\d+)", lambda one: f"{pattern}.{int(one[1]) + rng.choice([1, 40])}", key)


def exchanged(tensors, key):
    other = swapped(key)
    if other in tensors and tensors[key].shape != tensors[other].shape:
        tensors[key], tensors[other] = tensors[other], tensors[key]


def renamed(tensors, key, name):
    if name not in tensors:
        tensors[name] = tensors.pop(key)


def with_nan(tensor):
    return torch.cat([tensor.flatten()[1:], torch.tensor([float("nan")])]).view(tensor.shape)


def other_rank(config, rng):
    held, key = (config, "r") if "r" in config else (config["lora_parameters"], "rank")
    held[key] += rng.choice([1, 2])


MANGLES = {
    "a tensor less": lambda t, c, key, rng: t.pop(key),
    "a tensor more": lambda t, c, key, rng: t.update({f"{key}.x": t[key]}),
    "a twin": lambda t, c, key, rng: t.update({f"module.{key}": t[key]}),
    "A for B": lambda t, c, key, rng: exchanged(t, key),
    "transposed": lambda t, c, key, rng: t.update({key: t[key].T}) if is_oblong(t[key]) else None,
    "cut": lambda t, c, key, rng: t.update({key: t[key][..., :-1]}),
    "longer": lambda t, c, key, rng: t.update({key: torch.cat([t[key], t[key][:1]])}),
    "empty": lambda t, c, key, rng: t.update({key: t[key][:0]}),
    "NaN": lambda t, c, key, rng: t.update({key: with_nan(t[key])}),
    "integers": lambda t, c, key, rng: t.update({key: t[key].int()}),
    "another layer": lambda t, c, key, rng: renamed(t, key, moved(key, "layers", rng)),
    "another expert": lambda t, c, key, rng: renamed(t, key, moved(key, "experts", rng)),
    "another module": lambda t, c, key, rng: renamed(t, key, key.replace("self_attn", "cross_attn")),
    "another prefix": lambda t, c, key, rng: renamed(t, key, key.replace("model.layers", "layers")),
    "another rank": lambda t, c, key, rng: other_rank(c, rng),
    "another target": lambda t, c, key, rng: c.update(target_modules=["q_proj"]),
    "a further target": lambda t, c, key, rng: c.update(
        target_modules=[*targets, "gate_proj"]
        if isinstance(targets := c.get("target_modules"), list)
        else "q"
    ),
}


def is_oblong(tensor):
    return tensor.dim() == 2 and tensor.shape[0] != tensor.shape[1]


@pytest.mark.parametrize("seed", with_quick(range(100), (1, 2)))
def test_damaged_files_are_refused_or_the_same(seed, tmp_path):
    rng = Random(seed)
    family = rng.choice(FAMILIES)
    base = make_checkpoint(family, tmp_path / "base")
    shape = shape_of(read_config(base))

    def content(path):
        return read_adapter(path, shape, torch.float32, "a", base_dir=base).content_hash

    name, path = WEIGHTS_FILE, None
    while path is None:
        with suppress(Exception):  # of PEFT
            path = make_adapter(family, base, tmp_path / "a", scale=0.5, **random_adapter(rng, family))
    if rng.random() < 0.3:
        with suppress(StopIteration):  # tensors that mlx-lm has not
            name, path = MLX_FILE, as_mlx(path, tmp_path / "mlx", family)
    try:
        expected = content(path)
    except AdapterError:
        return
    tensors, config = load_file(path / name), json.loads((path / CONFIG_FILE).read_text())
    for number in range(NUM_MANGLES):
        case, key = rng.choice([*MANGLES]), rng.choice(sorted(tensors))
        changed, fields = dict(tensors), json.loads(json.dumps(config))
        MANGLES[case](changed, fields, key, rng)
        folder = tmp_path / f"mangled-{number}"
        folder.mkdir()
        save_file({key: one.contiguous().clone() for key, one in changed.items()}, folder / name)
        (folder / CONFIG_FILE).write_text(json.dumps(fields))
        with suppress(AdapterError):
            assert content(folder) == expected, (case, key)
