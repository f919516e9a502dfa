# SPDX-License-Identifier: Apache-2.0
"""verl's rollouts over SGLang's HTTP calls: adapters go as safetensors, not pickles."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from safetensors.torch import save

from .publisher import plain, whole_tensors


class SendsSafetensors:
    """Mixin before verl's `ServerAdapter` of the SGLang rollout."""

    def wrap_lora_params(
        self, peft_config: dict[str, Any], weights: Iterable[tuple[str, Any]]
    ) -> tuple[dict[str, Any], list[bytes]]:
        """The configuration for JSON, and one safetensors file for all ranks of the server."""
        config: dict[str, Any] = json.loads(json.dumps(peft_config, default=plain))
        return config, [save(whole_tensors(weights))]
