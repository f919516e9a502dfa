# SPDX-License-Identifier: Apache-2.0
"""TRL's asynchronous GRPO with a moe_lora server: syncs publish the adapter in place."""

from __future__ import annotations

import time
from typing import Any

from trl.experimental.async_grpo import AsyncGRPOTrainer as TrlTrainer
from trl.experimental.async_grpo import async_rollout_worker

from .publisher import Publisher, adapter_config, adapter_tensors


class PublishesInPlace:
    """Mixin for TRL's trainer: a sync publishes the next version of `lora_name`, the rollouts' model.

    Any loadable LoRA may train.  A sync has no pause and no file: running rollouts end on the former version.
    """

    lora_name = "trl-policy"

    def __init__(self: Any, *args: Any, **words: Any) -> None:
        # TRL's worker needs vLLM's package installed, but speaks HTTP alone.
        is_available = async_rollout_worker.is_vllm_available
        async_rollout_worker.is_vllm_available = lambda min_version=None: True
        try:
            super().__init__(*args, **words)
        finally:
            async_rollout_worker.is_vllm_available = is_available
        worker = self.rollout_worker
        if self._lora_sync and isinstance(worker, async_rollout_worker.AsyncRolloutWorker):
            # By default each version has a new name.
            worker._loop_kwargs |= {"model_name": self.lora_name, "lora_name": None}

    def _init_lora_sync(self: Any, model: Any) -> bool:
        self.vllm_client.wait_for_server_ready()
        self._publisher = Publisher(self.args.vllm_server_base_url, self.lora_name)
        return True

    def _sync_weight_lora(self: Any, start_s: float) -> tuple[float, float, float]:
        """Publish; returns the ends of pause, barrier and transfer.  Only the transfer takes time."""
        model = self.accelerator.unwrap_model(self.model)
        tensors = adapter_tensors(model, self._adapter_name)
        if self.accelerator.is_main_process:
            self._publisher.publish(tensors, adapter_config(model, self._adapter_name))
            self.model_version += 1
            if self.rollout_worker:
                self.rollout_worker.update_model_version(self.model_version)
        return start_s, start_s, time.time()


class AsyncGRPOTrainer(PublishesInPlace, TrlTrainer):
    """TRL's trainer with our syncs."""
