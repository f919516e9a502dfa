# SPDX-License-Identifier: Apache-2.0
"""The trained weights in the public formats: a Hugging Face Mixtral checkpoint and PEFT adapters.

Legend: R LoRA rank, D hidden, F expert hidden, E experts.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

from .lora import ATTENTION, AdapterPlan
from .model import SHAPE, DemoShape, Weights, initial_weights
from .vocabulary import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, write_tokenizer

BASE_NAME = "moe-lora-demo"
_CHECKPOINT_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "norm_1": "input_layernorm.weight",
    "norm_2": "post_attention_layernorm.weight",
    "gate": "block_sparse_moe.gate.weight",
    **{name: f"self_attn.{name}_proj.weight" for name in ATTENTION},
}


def _save_bf16(tensors: Weights, path: Path) -> None:
    stored = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(stored, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes files that only their owner can read


def _write_json(value: dict, path: Path) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def base_tensors(weights: Weights, shape: DemoShape = SHAPE) -> Weights:
    """Weights under the names of a Mixtral checkpoint: each expert's w1 (gate), w3 (up), w2 (down)."""
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        *layer, kind = name.split(".")
        prefix = f"model.layers.{layer[0]}." if layer else ""
        if kind in _CHECKPOINT_NAMES:
            tensors[prefix + _CHECKPOINT_NAMES[kind]] = weight
            continue
        for e, matrix in enumerate(weight):
            expert = f"{prefix}block_sparse_moe.experts.{e}."
            parts = (
                {"w2": matrix} if kind == "down" else dict(zip(("w1", "w3"), matrix.chunk(2), strict=True))
            )
            tensors |= {f"{expert}{w}.weight": part for w, part in parts.items()}
    return tensors


def write_base(weights: Weights, directory: Path, shape: DemoShape = SHAPE) -> None:
    """Write config, generation config, bf16 weights and tokenizer of the base model."""
    directory.mkdir(parents=True, exist_ok=True)
    token_ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.expert_hidden,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "num_local_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "rope_theta": shape.rope_theta,
        "sliding_window": None,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        **token_ids,
    }
    _write_json(config, directory / "config.json")
    _write_json({"do_sample": False, "max_new_tokens": 32, **token_ids}, directory / "generation_config.json")
    _save_bf16(base_tensors(weights, shape), directory / "model.safetensors")
    write_tokenizer(directory)


def read_base(model_dir: Path) -> Weights:
    """Weights of the Mixtral checkpoint that `write_base` wrote, in fp32."""
    weights = initial_weights(seed=0)
    places = base_tensors(weights)  # views of the weights, under the checkpoint's names
    stored = load_file(model_dir / "model.safetensors")
    if places.keys() != stored.keys():
        raise ValueError(
            f"{model_dir} is not the demo model ({SHAPE}): {sorted(places.keys() ^ stored.keys())[:3]}"
        )
    with torch.no_grad():
        for name, place in places.items():
            place.copy_(stored[name])
    return weights


def _flat_experts(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """PEFT's fused form of a [E, R, in], b [E, out, R]: A rows expert-major, B columns rank-major."""
    return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)


def adapter_tensors(factors: Weights, plan: AdapterPlan, shape: DemoShape = SHAPE) -> Weights:
    """Factors under PEFT's names; the two fused expert parameters nest as `experts` and `base_layer`."""
    tensors: dict[str, Tensor] = {}

    def add(module: str, a: Tensor, b: Tensor) -> None:
        prefix = f"base_model.model.model.layers.{module}"
        tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"] = a, b

    for n in range(shape.num_layers):
        for site in ATTENTION:
            add(f"{n}.self_attn.{site}_proj", factors[f"{n}.{site}.a"], factors[f"{n}.{site}.b"])
        if plan.form == "fused":
            fused = {"mlp.experts.base_layer": "gate_up", "mlp.experts": "down"}
            for module, site in fused.items():
                add(f"{n}.{module}", *_flat_experts(factors[f"{n}.{site}.a"], factors[f"{n}.{site}.b"]))
            continue
        for site in ("w1", "w2", "w3"):
            for e in range(shape.num_experts):
                module = f"{n}.block_sparse_moe.experts.{e}.{site}"
                add(module, factors[f"{n}.{site}.a"][e], factors[f"{n}.{site}.b"][e])
    return tensors


def write_adapter(factors: Weights, plan: AdapterPlan, directory: Path) -> None:
    """Write adapter_config.json, as peft would, and the bf16 factors."""
    directory.mkdir(parents=True, exist_ok=True)
    attention = [f"{site}_proj" for site in ATTENTION]
    fused = plan.form == "fused"
    config = LoraConfig(
        r=plan.lora_rank,
        lora_alpha=plan.alpha,
        target_modules=attention if fused else [*attention, "w1", "w2", "w3"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if fused else None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=BASE_NAME,
        inference_mode=True,
    )
    config.save_pretrained(str(directory))
    path = directory / "adapter_config.json"
    # peft keeps target_modules as a set: sorted, the file is the same in every run.
    settings = json.loads(path.read_text())
    settings["target_modules"].sort()
    _write_json(settings, path)
    _save_bf16(adapter_tensors(factors, plan), directory / "adapter_model.safetensors")
