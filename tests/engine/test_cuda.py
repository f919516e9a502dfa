# SPDX-License-Identifier: Apache-2.0
"""The engine on a CUDA device: the same answers, compiled, in buckets."""

from __future__ import annotations

import pytest
import torch

from bench.gpu.gpu_smoke import measure

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("eager", [True, False])
def test_all_adapters_answer_on_cuda(eager):
    assert measure("cuda", eager)["exact"] >= 0.95
