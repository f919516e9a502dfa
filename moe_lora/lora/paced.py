# SPDX-License-Identifier: Apache-2.0
"""LoraBackend that emulates another device."""

from __future__ import annotations

import time
from functools import partial

import torch

from moe_lora.config.optional_parts import StepProfile
from moe_lora.core.shape import ModelShape
from moe_lora.kernels.operands import StepTables
from moe_lora.timing.layer_stages import mlp_sites, prefill_shares, share_of_layer, with_deltas_s

from .backend import AddTo, LoraBackend, OuterBackend
from .row_routing import RowRouting


class PacedBackend(OuterBackend):
    """LoraBackend around another; sleeps up to each stage's time by `profile`.

    Decode rows count, and prompt rows if the profile has their time.  A late stage shortens later sleeps.
    Late deltas of host workers delay the device.  remote: a LoRA Server sleeps for its part.
    """

    def __init__(
        self, backend: LoraBackend, shape: ModelShape, profile: StepProfile, *, remote: bool
    ) -> None:
        super().__init__(backend)
        shape.check_equal_layers("emulation.step_profile")
        self._profile = profile
        self._remote = remote
        mlp = mlp_sites(shape)
        self._shares = {i: share_of_layer(s, shape) for i, s in enumerate(shape.sites) if s in mlp}
        self._prefill_shares = prefill_shares(shape)
        self._first_site = min(self._shares)
        self._num_rows = self._num_lora_rows = self._num_prompt_rows = 0
        self._host = False
        self._due_s = 0.0

    def begin_step(self, step: StepTables, routing: RowRouting) -> None:
        lengths = step.query_start[1:] - step.query_start[:-1]
        decode = (lengths == 1) & (step.seq_lens > 0)
        self._num_rows = int(decode.sum())
        num_terms = routing.terms.shape[2] if routing.has_deltas else 0
        self._num_lora_rows = num_terms * self._num_rows
        self._num_prompt_rows = int(lengths[step.seq_lens > 0].sum()) - self._num_rows
        self._host = bool(routing.loading.any())
        self._due_s = time.monotonic()
        super().begin_step(step, routing)

    def begin(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None) -> AddTo:
        if site == self._first_site:
            self._pass(self._profile.attention.seconds(self._num_rows))
        begun_s = time.monotonic()
        return partial(self._add_to, self.inner.begin(layer, site, x, ids), site, begun_s)

    def _add_to(self, add_to: AddTo | None, site: int, begun_s: float, y: torch.Tensor) -> None:
        host_s = 0.0
        if add_to is not None:
            add_to(y)
            host_s = time.monotonic() - begun_s if self._host else 0.0
        profile, share = self._profile, self._shares.get(site)
        if self._num_prompt_rows:
            prompt_s = self._prefill_shares[site] * profile.prefill.seconds(self._num_prompt_rows)
            self._pass(max(prompt_s, host_s))
        if share is None:
            return
        base_s, delta_s = share * profile.experts.seconds(self._num_rows), 0.0
        if not self._remote:
            delta_s = share * profile.lora.seconds(self._num_lora_rows)
        elif self._num_lora_rows:
            arrived_s = time.monotonic() + share * profile.transfer.seconds(self._num_lora_rows)
            delta_s = arrived_s - self._due_s
        self._pass(with_deltas_s(profile, base_s, delta_s, remote=self._remote))

    def _pass(self, seconds: float) -> None:
        self._due_s += seconds
        left_s = self._due_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
