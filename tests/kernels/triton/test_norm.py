# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from moe_lora.kernels import reference
from moe_lora.kernels.triton.norm import norm

from .gpu_cases import TOLERANCE


@pytest.mark.parametrize(("centred", "biased"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 37), (3, 2880)])
def test_rows_are_normed_as_by_the_reference(device, rows, width, dtype, centred, biased):
    generator = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, width, generator=generator) * 3 + 1).to(device, dtype)
    weight = torch.randn(width, generator=generator).to(device, dtype)
    bias = torch.randn(width, generator=generator).to(device, dtype) if biased else None
    found = norm(x, weight, 1e-6, centred, bias)
    torch.testing.assert_close(
        found, reference.norm(x, weight, 1e-6, centred, bias), atol=1e-6, rtol=2 * TOLERANCE[dtype]
    )
    alone = norm(x[-1:], weight, 1e-6, centred, bias)
    assert torch.equal(alone[0], found[-1])


def test_no_rows_and_rows_that_are_not_contiguous(device):
    weight = torch.ones(8, device=device)
    assert norm(weight.new_empty(0, 8), weight, 1e-6, False).shape == (0, 8)
    wide = torch.arange(32.0, device=device).view(2, 16)
    for x in (wide[:, ::2], wide[:, 3:11]):
        assert torch.equal(norm(x, weight, 1e-6, False), norm(x.contiguous(), weight, 1e-6, False))


def test_operands_that_do_not_fit_are_refused(device):
    x = torch.ones(2, 8, device=device)
    for weight, rows in ((torch.ones(7, device=device), x), (torch.ones(8, device=device), x.double())):
        with pytest.raises(ValueError, match=r"a weight for each column"):
            norm(rows, weight, 1e-6, False)
    with pytest.raises(ValueError, match=r"bias is \(7,\)"):
        norm(x, torch.ones(8, device=device), 1e-6, True, torch.ones(7, device=device))
