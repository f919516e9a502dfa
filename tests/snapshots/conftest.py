# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from tests.serve.conftest import engine, tokenizer

__all__ = ["engine", "tokenizer"]
