# SPDX-License-Identifier: Apache-2.0
"""A callback of transformers' Trainer: serves each epoch's adapter."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .publisher import Publisher, adapter_config, adapter_tensors


class PublishEachEpoch(TrainerCallback):
    """Publishes the PEFT model's adapter after each epoch and after training.

    versions: published, in order.
    """

    def __init__(self, url: str, name: str, api_key: str | None = None, adapter: str = "default") -> None:
        self.versions: list[int] = []
        self._adapter = adapter
        self._server = url, name, api_key

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **words: Any
    ) -> None:
        self._publisher, self._published_step = Publisher(*self._server), -1

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **words: Any
    ) -> None:
        self._publish(state, words["model"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **words: Any
    ) -> None:
        if args.load_best_model_at_end:
            self._published_step = -1
        self._publish(state, words["model"])
        self._publisher.close()

    def _publish(self, state: TrainerState, model: Any) -> None:
        """Publish a step once: all ranks gather shards, the first rank sends."""
        if state.global_step == self._published_step:
            return
        self._published_step = state.global_step
        tensors = adapter_tensors(model, self._adapter)
        if state.is_world_process_zero:
            self.versions.append(self._publisher.publish(tensors, adapter_config(model, self._adapter)))
