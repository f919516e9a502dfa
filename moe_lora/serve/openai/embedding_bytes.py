# SPDX-License-Identifier: Apache-2.0
"""Vectors as bytes of vLLM's types, for base64 and for answers of bytes."""

from __future__ import annotations

from typing import Any

import numpy as np


def as_bytes(values: np.ndarray[Any, Any], embed_type: str, endianness: str) -> bytes:
    """The vector in this type, rounded to the nearest value, ties to even, as torch rounds.

    values: [H] fp32.  endianness: native, little or big.  A value beyond the type's range becomes an
    infinity, and 448 in fp8_e4m3, a type without infinities.
    """
    if embed_type == "float32":
        found = values
    elif embed_type == "float16":
        with np.errstate(over="ignore"):
            found = values.astype(np.float16)
    elif embed_type == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        found = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    else:
        found = _as_fp8(values, *((3, 0x7E) if embed_type == "fp8_e4m3" else (2, 0x7C)))
    order = "=" if endianness == "native" else ">" if endianness == "big" else "<"
    return found.astype(found.dtype.newbyteorder(order)).tobytes()


def _as_fp8(values: np.ndarray[Any, Any], mantissa_bits: int, last: int) -> np.ndarray[Any, Any]:
    """Codes of one byte: sign, exponent, mantissa.  last: the largest code of a number."""
    codes = np.arange(last + 1)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    bias = (1 << (6 - mantissa_bits)) - 1
    is_normal = exponent > 0
    fraction = is_normal + mantissa / (1 << mantissa_bits)
    table = np.ldexp(fraction, np.where(is_normal, exponent, 1) - bias)
    middles, sizes = (table[1:] + table[:-1]) / 2, np.abs(values.astype(np.float64))
    found = np.searchsorted(middles, sizes, side="left")
    found += np.isin(sizes, middles) & (found % 2 == 1)
    return (found + np.signbit(values) * 0x80).astype(np.uint8)
