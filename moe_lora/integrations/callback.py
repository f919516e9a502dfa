# SPDX-License-Identifier: Apache-2.0
"""A callback of transformers' Trainer: serves each epoch's adapter."""

from __future__ import annotations

import logging
import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .publisher import BusyServerError, NoAnswerError, Publisher, adapter_config, adapter_tensors

logger = logging.getLogger(__name__)
BUSY_S = 300.0
"""Limit of the wait for a busy server."""


class PublishEachEpoch(TrainerCallback):
    """Publishes the PEFT model's adapter after each epoch and after training.

    Waits while the server is busy.  Without an answer after an epoch, training goes on.  A refusal, and no
    answer before or after training, raise AdapterError.
    versions: published, in order.
    """

    def __init__(self, url: str, name: str, api_key: str | None = None, adapter: str = "default") -> None:
        self.versions: list[int] = []
        self._adapter = adapter
        self._server = url, name, api_key

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **words: Any
    ) -> None:
        self._publisher, self._gathered_step = Publisher(*self._server), -1
        self._unsent: tuple[Any, Any] | None = None
        if state.is_world_process_zero:
            self._publisher.check_server()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **words: Any
    ) -> None:
        try:
            self._publish(state, words["model"])
        except NoAnswerError as error:
            logger.warning("the adapter of step %d is not published: %s", state.global_step, error)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **words: Any
    ) -> None:
        if args.load_best_model_at_end:
            self._gathered_step = -1
        try:
            self._publish(state, words["model"])
        finally:
            self._publisher.close()

    def _publish(self, state: TrainerState, model: Any) -> None:
        """Publish a step once: all ranks gather shards, the first rank sends, again after a failure."""
        if state.global_step != self._gathered_step:
            self._gathered_step = state.global_step
            tensors = adapter_tensors(model, self._adapter)
            if state.is_world_process_zero:
                self._unsent = tensors, adapter_config(model, self._adapter)
        end_s = time.monotonic() + BUSY_S
        while self._unsent is not None:
            try:
                self.versions.append(self._publisher.publish(*self._unsent))
                self._unsent = None
            except BusyServerError as error:
                if time.monotonic() >= end_s:
                    raise
                time.sleep(error.retry_s)
