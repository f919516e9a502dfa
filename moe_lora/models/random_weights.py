# SPDX-License-Identifier: Apache-2.0
"""Random weights of a model's real sizes, for measurements of speed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from moe_lora.core.errors import ConfigError
from moe_lora.families.schema.config_json import text_config
from moe_lora.families.schema.family import ModelSpec
from moe_lora.kernels.quantised import E8M0_BIAS, format_of

from .causal_lm import CausalLM
from .stored_weight import StoredWeight
from .weights import HeadRows, Piece, WeightMap, linear_weight_map

_BIAS_BOUND = 0.1
_SCALES = "_scales"
_GROUP = 32
_CODES_STD = math.sqrt(sum(v * v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)
"""Standard deviation of uniform MXFP4 codes."""


class RandomCheckpoint:
    """Replaces a `Checkpoint`: tensors by name, each created on access.

    A matrix [N, K] (N outputs, K inputs) is uniform with variance 1 / K, an embedding has variance 1, norms
    are ones.  Values depend only on name and type of device: equal over ranks and restarts.  MXFP4 experts
    have random codes.  Raises ConfigError for another quantised config.json.
    """

    scheme = None

    def __init__(self, spec: ModelSpec, config: Mapping[str, Any], device: torch.device) -> None:
        method = (text_config(config).get("quantization_config") or {}).get("quant_method")
        if method not in (None, "mxfp4"):
            raise ConfigError(
                f"load_format='dummy' makes no weights of quant_method={method!r}; take quantization_config "
                "out of a copy of config.json, and give quantize=... for weights of that kind"
            )
        self.model_dir = "load_format='dummy'"
        self._device = device
        with torch.device("meta"):
            model = CausalLM(spec)
        self.weights: WeightMap = linear_weight_map(spec)
        """A separate tensor for each linear layer."""
        for name, pieces in self.weights.items():
            if isinstance(pieces[0].transform, HeadRows):
                self.weights[name] = [Piece(name)]
        parameters = dict(model.named_parameters())
        self._shapes = {
            piece.key: parameters[name][piece.index].shape
            for name, pieces in self.weights.items()
            for piece in pieces
        }
        self._last_codes: tuple[str, torch.Tensor] | None = None
        for name in self.weights if method == "mxfp4" else ():
            if name.endswith(("mlp.gate_up.weight", "mlp.down.weight")):
                # A pair of tensors marks a quantised weight.
                self.weights[name] = [
                    replace(one, extra_keys=(one.key + _SCALES,)) for one in self.weights[name]
                ]

    def tensor(self, piece: Piece) -> torch.Tensor | StoredWeight:
        return self._mxfp4(piece.key) if piece.extra_keys else self[piece.key]

    def read_into(self, piece: Piece, out: torch.Tensor) -> bool:
        """False: `tensor` makes the values."""
        return False

    def will_read(self, pieces: Iterable[Piece]) -> None:
        """No effect: no file is read."""

    release = will_read

    def __contains__(self, key: object) -> bool:
        return key in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __getitem__(self, key: str) -> torch.Tensor:
        shape, bound = self._shapes[key], _BIAS_BOUND
        if len(shape) == 1 and "norm" in key and not key.endswith("bias"):
            return torch.ones(shape, device=self._device)
        if len(shape) > 1:
            is_embedding = key == self.weights["embedding"][0].key
            bound = math.sqrt(3.0 if is_embedding else 3.0 / shape[-1])
        return torch.empty(shape, device=self._device).uniform_(-bound, bound, generator=self._drawing(key))

    def _drawing(self, key: str) -> torch.Generator:
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1
        return torch.Generator(self._device).manual_seed(seed)

    def _mxfp4(self, key: str) -> StoredWeight:
        """Uniform codes, drawn at read: the loader opens all matrices at once."""
        num_out, width = self._shapes[key]

        def codes(rows: slice) -> torch.Tensor:
            if self._last_codes is None or self._last_codes[0] != key:
                drawn = torch.empty(num_out, width, dtype=torch.uint8, device=self._device)
                self._last_codes = key, drawn.random_(0, 16, generator=self._drawing(key))
            return self._last_codes[1][rows]

        exponent = E8M0_BIAS + round(math.log2(width**-0.5 / _CODES_STD))
        scale = torch.tensor(exponent, dtype=torch.uint8, device=self._device)
        groups = -(-width // _GROUP)
        return StoredWeight(
            format_of("mxfp4", _GROUP), (num_out, width), codes, scale.expand(num_out, groups)
        )
