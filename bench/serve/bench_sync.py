# SPDX-License-Identifier: Apache-2.0
"""Seconds of a weight sync from TRL to a server: by tensors, by files, and the trainer's part of merging.

    python -m bench.serve.bench_sync [--out FILE] [--quick]

TRL's asynchronous GRPO trains expert LoRA with rollouts under way (`demo.train_policy`).  Each step syncs in
all three ways, in an order that turns.  By files is TRL's own sync: pause, save, load under a new name,
resume, unload.  Merged: pause, merge, save all weights, unmerge, resume; no server loads them, so that time
is a lower bound.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from trl.experimental.async_grpo import AsyncGRPOTrainer as TrlTrainer
from trl.experimental.async_grpo.async_grpo_trainer import _iter_vllm_named_params

from bench.harness.interleave import ratio
from bench.harness.records import ROOT, Recorder
from demo.train_policy import make_trainer, write_model
from moe_lora.integrations.trl import AsyncGRPOTrainer

from .served_tree import ServedTree

SIZE = {"hidden_size": 256, "num_layers": 4, "num_experts": 16}


class Compared(AsyncGRPOTrainer):
    """Syncs in three ways at each step; rollouts use the published tensors."""

    def __init__(self, *args: Any, **words: Any) -> None:
        self.seconds: dict[str, list[float]] = {"tensors": [], "files": [], "merged": []}
        self._files_version = 0
        super().__init__(*args, **words)

    def _sync_weight_lora(self: Any, start_s: float) -> tuple[float, float, float]:
        ways = {"tensors": super()._sync_weight_lora, "files": self._by_files, "merged": self._merged}
        first = len(self.seconds["files"]) % len(ways)
        for name in [*ways][first:] + [*ways][:first]:
            begin_s = time.perf_counter()
            ways[name](time.time())
            self.seconds[name].append(time.perf_counter() - begin_s)
        return start_s, start_s, time.time()

    def _by_files(self: Any, start_s: float) -> None:
        """TRL's sync, with a count of versions of its own."""
        published, self.model_version = self.model_version, self._files_version
        TrlTrainer._sync_weight_lora(self, start_s)
        self._files_version, self.model_version = self.model_version, published
        self.rollout_worker.update_model_version(published)

    def _merged(self: Any, start_s: float) -> None:
        model = self.accelerator.unwrap_model(self.model)
        self.vllm_client.pause()
        model.merge_adapter()
        weights = {name: one.detach() for name, one in _iter_vllm_named_params(model)}
        save_file(weights, os.path.join(self.args.output_dir, "merged.safetensors"))
        model.unmerge_adapter()
        self.vllm_client.resume()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="the demo's model, two steps: does it run?")
    parser.add_argument("--out", help="append records here")
    options = parser.parse_args()
    record = Recorder(options.out)
    num_steps, size = (2, {}) if options.quick else (options.steps, SIZE)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_model(model, **size)
        words = [str(model), "--dtype", "float32", "--eager", "--threads", "1"]
        with ServedTree(ROOT, sys.executable, *words) as server:
            url = f"http://127.0.0.1:{server.port}"
            trainer = make_trainer(Compared, model, url, num_steps=num_steps, output=folder)
            trainer.train()
            seconds = {name: found[1:] for name, found in trainer.seconds.items()}  # the first warms up
        num_bytes = {
            "model": sum(one.stat().st_size for one in model.glob("*.safetensors")),
            "adapter": sum(4 * one.numel() for one in trainer.model.parameters() if one.requires_grad),
        }
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    result = {
        "median_s": {name: statistics.median(found) for name, found in seconds.items()},
        "files_over_tensors": ratio(seconds["files"], seconds["tensors"]),
        "merged_over_tensors": ratio(seconds["merged"], seconds["tensors"]),
        "rewards": rewards,
        "bytes": num_bytes,
    }
    print({name: value for name, value in result.items() if name != "rewards"})
    record({"bench": "sync", **size, "steps": num_steps, "quick": options.quick}, result)


if __name__ == "__main__":
    main()
