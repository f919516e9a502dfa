"""MXFP4 weights (OCP Microscaling Formats v1.0): FP4 E2M1 values with one E8M0 scale per 32 of them."""

from __future__ import annotations

import torch

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0_BIAS = 127


def dequantise(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """out[..., 32 * g + i] = E2M1(nibble i of block g) * 2 ** (scales[..., g] - 127).

    blocks: [..., G, 16] uint8, two values per byte, low nibble first.  scales: [..., G] uint8.
    Returns [..., 32 * G] fp32, exact for scale bytes of 2 and more (E2M1 has two significant bits, so bf16
    holds the values too).
    """
    assert blocks.dtype == scales.dtype == torch.uint8
    assert blocks.shape == (*scales.shape, 16)
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32)
    nibbles = torch.stack([blocks & 0xF, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.to(torch.int32) - E8M0_BIAS
    return torch.ldexp(values[nibbles.int()], exponents[..., None]).flatten(-2)
