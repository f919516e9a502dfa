# SPDX-License-Identifier: Apache-2.0
"""Train expert LoRA by TRL's asynchronous GRPO against a running server, on a CPU.

    python -m demo.train_policy model FOLDER
    moe-lora serve FOLDER --dtype float32 --eager --port 8000
    python -m demo.train_policy train FOLDER --url http://127.0.0.1:8000

The model is random and the reward is the share of some tokens, so that tens of steps show a rise.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

REWARDED = range(32, 64)
"""Token ids, a quarter of the vocabulary."""
PROMPTS = ("abc", "hello", "Xy", "moe")
NUM_GENERATIONS, NUM_TOKENS = 8, 8
ANSWERS = {"defaults": {"role": "assistant"}, "fields": {"content": {"content": "text"}}}
"""How TRL reads an answer: as text."""


def write_model(folder: Path, *, hidden_size: int = 64, num_layers: int = 2, num_experts: int = 4) -> None:
    """A random Qwen3-MoE with the demo's tokenizer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    shape = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=hidden_size,
        moe_intermediate_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=num_experts,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(shape).save_pretrained(folder)
    demo = Path(__file__).parent / "model"
    shutil.copy(demo / "tokenizer.json", folder)
    config = json.loads((demo / "tokenizer_config.json").read_text()) | {"response_template": ANSWERS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def share_of_rewarded(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(one in REWARDED for one in ids) / max(len(ids), 1) for ids in completion_ids]


def attend_along_paths(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """TRL's tree attention without its CUDA kernel.

    query: [1, heads, T, D]; key, value: [1, KV heads, T, D].  Rows q[s]:q[s + 1] of segment s attend to the
    rows kv_index[k[s]:k[s + 1]], causally from their ends.  Returns [1, T, heads, D].
    """
    out = torch.empty_like(query)
    q_ends, k_ends = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    for segment in range(len(q_ends) - 1):
        rows = slice(q_ends[segment], q_ends[segment + 1])
        path = tree_kv_index[k_ends[segment] : k_ends[segment + 1]].long()
        num_rows = rows.stop - rows.start
        seen = torch.ones(num_rows, len(path), dtype=torch.bool).tril(len(path) - num_rows)
        out[:, :, rows] = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, rows],
            key[:, :, path],
            value[:, :, path],
            attn_mask=seen,
            scale=scaling,
            enable_gqa=True,
        )
    return out.transpose(1, 2), None


def make_trainer(kind: Any, folder: Path, url: str, *, num_steps: int, output: str) -> Any:
    """A trainer of class `kind` with LoRA on experts and attention."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AttentionInterface
    from trl.experimental.async_grpo import AsyncGRPOConfig, async_grpo_trainer

    args = AsyncGRPOConfig(
        output_dir=output,
        vllm_server_base_url=url,
        learning_rate=0.05,
        max_steps=num_steps,
        per_device_train_batch_size=32,
        num_generations=NUM_GENERATIONS,
        max_completion_length=NUM_TOKENS,
        max_staleness=1,
        token_budget=0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        router_aux_loss_coef=0.0,
        seed=0,
    )
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], target_parameters=experts)
    prompts = Dataset.from_dict({"prompt": [[{"role": "user", "content": one}] for one in PROMPTS]})
    words = {"args": args, "train_dataset": prompts, "peft_config": lora}
    # TRL reads the name of the CUDA device for a metric.
    with patch.object(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None):
        found = kind(model=str(folder), reward_funcs=share_of_rewarded, **words)
    AttentionInterface.register("tree_fa3", attend_along_paths)
    return found


def train(folder: Path, url: str, num_steps: int) -> list[dict[str, float]]:
    """Logs of all steps."""
    from moe_lora.integrations.trl import AsyncGRPOTrainer

    with tempfile.TemporaryDirectory() as output:
        trainer = make_trainer(AsyncGRPOTrainer, folder, url, num_steps=num_steps, output=output)
        trainer.train()
        return [log for log in trainer.state.log_history if "reward" in log]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["model", "train"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    if args.what == "model":
        write_model(args.folder)
        return
    logs = train(args.folder, args.url, args.steps)
    for number in range(0, len(logs), 10):
        some = logs[number : number + 10]
        mean = sum(log["reward"] for log in some) / len(some)
        print(f"steps {number + 1} to {number + len(some)}: mean reward {mean:.2f}")


if __name__ == "__main__":
    main()
