# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import inspect

import pytest
import torch

from moe_lora.kernels import ops


@pytest.mark.parametrize("schema", [pytest.param(one, id=one.partition("(")[0]) for one in ops._OPS])
def test_an_operation_and_its_fake_take_the_arguments_of_the_schema(schema: str) -> None:
    num_arguments = len(torch._C.parse_schema(f"moe_lora::{schema}").arguments)
    for function in ops._OPS[schema]:
        inspect.signature(function).bind(*range(num_arguments))
