# SPDX-License-Identifier: Apache-2.0
"""An engine for a test to kill.  Arguments: folder of the model, number of ranks, folder of the adapter."""

from __future__ import annotations

import signal
import sys

from moe_lora import LLM

if __name__ == "__main__":
    model, num_ranks, adapter = sys.argv[1:]
    settings = {"dtype": "float32", "eager": True, "num_threads": 1, "host_workers": 1}
    llm = LLM(model, expert_parallel=int(num_ranks), adapters={"a": adapter}, **settings)
    print("ready", flush=True)
    signal.pause()
