# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_lora import families
from moe_lora.core.shape import ModelShape
from tests.families import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """family → folder of its tiny checkpoint, made once."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = make_checkpoint(family, tmp_path_factory.mktemp(family) / "base")
        return made[family]

    return make


@pytest.fixture(scope="session")
def shape_of(checkpoint):
    """family → ModelShape of its tiny checkpoint."""

    def read(family: str) -> ModelShape:
        return families.shape_of(json.loads((checkpoint(family) / "config.json").read_text()))

    return read
