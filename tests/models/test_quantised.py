# SPDX-License-Identifier: Apache-2.0
"""A quantised base against transformers and peft over the weights that it stands for."""

from __future__ import annotations

import subprocess
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from torchao.quantization import Float8Tensor
from torchao.quantization.granularity import PerBlock, PerRow

from moe_lora.core.errors import ConfigError
from moe_lora.core.wrong_files import SINGLE_NAME
from moe_lora.kernels import quantised
from moe_lora.models import loader
from moe_lora.models.loader import load_model
from moe_lora.models.mlp import MoeMlp
from moe_lora.models.quantised_weight import QuantisedWeight, quantisation_of
from tests.families import (
    DENSE_FAMILIES,
    FAMILIES,
    LATER_FAMILIES,
    RECURRENT_FAMILIES,
    make_adapter,
    make_checkpoint,
    shard_of,
)
from tests.forked_programs import start_program
from tests.grids import diagonal
from tests.oracle import greedy_reference, reference_logits
from tests.quantised import dequantised, dequantised_checkpoint, torchao_logits
from tests.stored_checkpoints import stored_pair

from .harness import Harness
from .test_oracle import MAX_LOGIT_DIFFERENCE, make_prompts

CPU = torch.device("cpu")
INT8 = quantisation_of("int8", None, False)
INT4 = quantisation_of("int4", 32, False)
FP8 = quantisation_of("fp8", None, False)
SLOTS = (-1, 0, 1, -1, 0, 1, -1)
NUM_TOKENS = 16
SEEDS = {
    "llama": 2,
    "mixtral": 1,
    "qwen3_moe": 3,
    "gpt_oss": 0,
    "dbrx": 0,
    **dict.fromkeys(LATER_FAMILIES, 0),
    **dict.fromkeys(("mistral", "glm4", "gemma3", "gemma4", "dots1", "qwen3_5_moe"), 1),
    "glm4_moe_lite": 2,
    "deepseek_v3": 3,
    "afmoe": 4,
}
_EXPERTS = {"moe_intermediate_size": 32, "intermediate_size": 32}
_RECURRENT = {**_EXPERTS, "shared_expert_intermediate_size": 32, "linear_value_head_dim": 16}
_LATENT = {**_EXPERTS, "q_lora_rank": 32, "v_head_dim": 32}
SIZES = {
    **dict.fromkeys(RECURRENT_FAMILIES, _RECURRENT),
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), _LATENT),
    "deepseek_v2": {**_LATENT, "q_lora_rank": None},
    "gemma4": {**_EXPERTS, "global_head_dim": 32},
    "dbrx": {"ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}},
    "glm4_moe": _EXPERTS,
    "ernie4_5_moe": _EXPERTS,
    "afmoe": _EXPERTS,
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 64},
    "dots1": _EXPERTS,
    "granitemoeshared": {"intermediate_size": 32, "shared_intermediate_size": 32},
    "qwen3_vl_moe": {"moe_intermediate_size": 32},
}
"""Inner sizes that groups of 32 divide."""


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """family → a tiny checkpoint with two adapters, on attention and experts, one on the gate too."""
    made = {}

    def make(family, seed=None):
        if (family, seed) not in made:
            folder = tmp_path_factory.mktemp(family)
            changes = SIZES.get(family, {"intermediate_size": 32})
            if family == "qwen3_moe":
                changes = {"moe_intermediate_size": 32}
            model = make_checkpoint(
                family, folder / "base", seed=SEEDS[family] if seed is None else seed, **changes
            )
            gate = ("router",) if family not in DENSE_FAMILIES else ()
            first = make_adapter(family, model, folder / "first", 4, seed=4)
            targets = ("qkv", "o", "gate_up", "down", *gate)
            made[family, seed] = (
                model,
                (first, make_adapter(family, model, folder / "second", 8, targets, seed=8)),
            )
        return made[family, seed]

    return make


QUICK_FORMATS = [
    ("qwen3_moe", INT8),
    ("gpt_oss", INT4),
    ("mixtral", FP8),
]
FORMATS = [
    pytest.param(family, q, id=f"{family}-{q.form.name}", marks=marks)
    for q in (INT8, INT4, FP8)
    for family in FAMILIES
    for marks in [() if (family, q) in QUICK_FORMATS else pytest.mark.slow]
]


@pytest.mark.parametrize(("family", "quantisation"), FORMATS)
def test_mixed_batch_continues_as_peft_does_over_the_dequantised_weights(
    family, quantisation, base, tmp_path
):
    model_dir, adapters = base(family)
    oracle = dequantised_checkpoint(model_dir, quantisation, tmp_path / "dequantised")
    prompts = make_prompts()
    harness = Harness(model_dir, adapters, quantisation=quantisation)
    held = [m for m in harness.model.modules() if isinstance(m, QuantisedWeight)]
    assert len(held) == 4 * harness.model.spec.shape.num_layers
    _, logits = harness.prefill(prompts, SLOTS)
    found = Harness(model_dir, adapters, quantisation=quantisation).greedy(prompts, SLOTS, NUM_TOKENS)
    for slot, prompt, rows, tokens in zip(SLOTS, prompts, logits, found, strict=True):
        adapter = None if slot < 0 else adapters[slot]
        expected = reference_logits(oracle, adapter, prompt)
        assert (rows - expected).abs().max() < MAX_LOGIT_DIFFERENCE, slot
        greedy = greedy_reference(oracle, adapter, [prompt], NUM_TOKENS, [tokens])
        greedy.check_margins()
        assert tuple(tokens) == greedy.tokens[0], (slot, len(prompt))


@pytest.mark.parametrize("group_size", [None, 128])
def test_fp8_is_what_torchao_makes_and_takes_half_the_memory(group_size, tmp_path):
    """Heads of 64 rows: blocks of a fused qkv are as high as its parts allow."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    model_dir = make_checkpoint("llama", tmp_path, num_key_value_heads=1, **sizes)
    quantisation = quantisation_of("fp8", group_size, False)
    plain = dict(load_model(model_dir, torch.bfloat16, CPU).named_parameters())
    model = load_model(model_dir, torch.bfloat16, CPU, quantisation=quantisation)
    for name, weight in model.named_modules():
        if isinstance(weight, QuantisedWeight):
            height = 1 if group_size is None else 64 if "qkv" in name else 128
            block = PerRow() if group_size is None else PerBlock((height, 128))
            expected = Float8Tensor.from_hp(plain[name], granularity=block)
            assert torch.equal(weight.dequantised(), expected.dequantize()), name
            taken = weight.data.nbytes + weight.scale.nbytes
            assert taken <= 0.51 * plain[name].nbytes, name


def test_blocks_at_the_ends_of_a_matrix_may_be_parts(tmp_path):
    sizes = {"hidden_size": 96, "intermediate_size": 200, "num_attention_heads": 3, "head_dim": 64}
    model_dir = make_checkpoint("llama", tmp_path, num_key_value_heads=1, **sizes)
    model = load_model(model_dir, torch.float32, CPU, quantisation=quantisation_of("fp8", 128, True))
    plain = load_model(model_dir, torch.float32, CPU)
    assert tuple(model.layers[0].mlp.down.weight.scale.shape) == (1, 2)
    for held, weight in (
        (model.layers[0].mlp.down.weight, plain.layers[0].mlp.down.weight),
        (model.head, plain.head),
    ):
        found = held.dequantised()
        for part, block in zip(found.split(128, 1), weight.split(128, 1), strict=True):
            assert (part - block).abs().max() <= block.abs().max() / 16


@pytest.mark.parametrize("tied", [False, True])
def test_head_is_quantised_where_asked_and_a_tied_embedding_is_not(tied, tmp_path):
    model_dir = make_checkpoint("llama", tmp_path / "base", tie_word_embeddings=tied)
    quantisation = quantisation_of("int8", None, True)
    model = load_model(model_dir, torch.float32, CPU, quantisation=quantisation)
    plain = load_model(model_dir, torch.float32, CPU)
    assert torch.equal(model.head.dequantised(), dequantised(plain.head, quantisation))
    assert torch.equal(model.embedding, plain.embedding)


def test_router_norms_embedding_and_head_stay_as_they_are(base):
    model_dir, _ = base("mixtral")
    plain = dict(load_model(model_dir, torch.float32, CPU).named_parameters())
    kept = dict(load_model(model_dir, torch.float32, CPU, quantisation=INT8).named_parameters())
    assert {name for name in plain if name not in kept} == {
        f"layers.{layer}.{part}.weight"
        for layer in range(2)
        for part in ("attention.qkv", "attention.o", "mlp.gate_up", "mlp.down")
    }
    for name, weight in kept.items():
        assert torch.equal(weight, plain[name]), name


def test_a_rank_holds_its_experts_quantised(base):
    model_dir, _ = base("gpt_oss")
    whole = load_model(model_dir, torch.float32, CPU, quantisation=INT8).layers[1].mlp
    shard = shard_of(model_dir, expert_parallel=2, dist_rank=1)
    part = load_model(model_dir, torch.float32, CPU, shard, INT8).layers[1].mlp
    for name in ("gate_up", "down"):
        held, all_ = getattr(part, name).weight, getattr(whole, name).weight
        assert torch.equal(held.data, all_.data[2:])
        assert torch.equal(held.scale, all_.scale[2:])


MEASURED = """
import ctypes
import sys
import threading
import numpy
import torch
from pathlib import Path
from moe_lora.core.progress import silent
from moe_lora.kernels import quantised
from moe_lora.models import quantised_checkpoint
from moe_lora.models.loader import load_model
from moe_lora.models.mlp import MoeMlp
from moe_lora.models.quantised_weight import quantisation_of

# Freed buffers leave the process at once, and pages have one size: else the peak is the allocator's.
M_MMAP_THRESHOLD = -3
assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
numpy._core.multiarray._set_madvise_hugepage(0)

def anonymous():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon")) * 1024

def one_peak(work):
    most, done, before = [0], threading.Event(), anonymous()
    def watch():
        while not done.wait(0.0005):
            most[0] = max(most[0], anonymous())
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        made = work()
    finally:
        done.set()
    thread.join()
    return most[0] - before, made

def peak(work):
    # Threads and imports only add to it, by chance: the least of three runs is the work's.
    (least, made), *more = (one_peak(work) for _ in range(3))
    return min(least, *(most for most, _ in more)), made

def told(most, model):
    stays = sum(w.nbytes for w in (*model.parameters(), *model.buffers()))
    print(most, stays, max(w.shape.numel() * 2 for w in model.modules() if hasattr(w, "form")))

folder, quantisation = Path(sys.argv[1]), quantisation_of("int4", 32, False)
bf16, cpu = torch.bfloat16, torch.device("cpu")
quantised.quantise(torch.randn(64, 1024), quantisation.form)
told(*peak(lambda: load_model(folder / "base", bf16, cpu, quantisation=quantisation)))
quantised_checkpoint.SHARD_BYTES = 10 << 20
outs = iter(folder / f"out{n}" for n in range(3))
write = quantised_checkpoint.quantise_checkpoint
print(peak(lambda: write(folder / "base", next(outs), quantisation, bf16, silent))[0])
told(*peak(lambda: load_model(folder / "out0", bf16, cpu)))
"""


def test_loading_takes_little_more_than_what_stays(tmp_path):
    """Quantised on the way, and as stored.  One matrix of this model in floating point is larger than what
    may be there beside the rest; of writing the bound is two files.
    """
    make_checkpoint(
        "llama",
        tmp_path / "base",
        dtype=torch.bfloat16,
        hidden_size=1024,
        intermediate_size=4096,
        vocab_size=128,
        num_hidden_layers=2,
    )
    program = start_program(MEASURED, str(tmp_path), stdout=subprocess.PIPE)
    lines = program.communicate()[0].splitlines()
    assert program.returncode == 0
    at_load, writing, stored = ([int(n) for n in line.split()] for line in lines)
    for peak, stays, largest in (at_load, stored):
        assert largest > stays / 3, "the test is of no use with small matrices"
        assert peak <= 1.1 * stays + (2 << 20)
    assert writing[0] <= 2 * (10 << 20) + at_load[1] / 10


@pytest.mark.parametrize(
    ("quantize", "group", "message"),
    [
        (
            "int4",
            64,
            r"'int4' can't hold layers\.0\.attention\.qkv\.weight of shape \(128, 32\): its 32 inputs are no",
        ),
        (
            "int4",
            32,
            r"layers\.0\.mlp\.down\.weight of shape \(32, 24\): its 24 inputs are no multiple of .* 32",
        ),
    ],
)
def test_shape_that_a_format_can_not_hold_is_named(quantize, group, message, served):
    with pytest.raises(ConfigError, match=message):
        load_model(
            served("llama").model_dir,
            torch.float32,
            CPU,
            quantisation=quantisation_of(quantize, group, False),
        )


def test_dynamic_format_is_refused_on_a_gpu(served):
    quantisation = quantisation_of("int8-dynamic", None, False)
    with pytest.raises(ConfigError, match=r"runs on CPU only so far, not on cuda; .* quantize='int8'"):
        load_model(served("llama").model_dir, torch.float32, torch.device("cuda"), quantisation=quantisation)


@pytest.mark.parametrize(
    ("kind", "new", "held"),
    [
        (None, True, ["int8"] * 8),
        ("w4a16", True, ["int4"] * 8),
        ("fp8", True, ["fp8"] * 8),
        ("fp8", False, []),
    ],
)
def test_formats_are_held_on_a_gpu(kind, new, held, base, tmp_path, monkeypatch):
    """Asked for, and as stored; on the way to a device that need not be there.  new: it has fp8."""

    class Found(Exception):
        pass

    def allocated(model, device):
        raise Found([one.form.name for one in model.modules() if isinstance(one, QuantisedWeight)])

    monkeypatch.setattr(loader, "_allocated", allocated)
    monkeypatch.setattr(loader, "_multiplies_fp8", lambda device: new)
    model_dir, _ = base("llama")
    quantisation = INT8 if kind is None else None
    folder = model_dir if kind is None else stored_pair(model_dir, kind, tmp_path)[0]
    with pytest.raises(Found) as found:
        load_model(folder, torch.float32, torch.device("cuda"), quantisation=quantisation)
    assert found.value.args[0] == held


def test_fp8_is_refused_on_a_gpu_that_has_none(served, monkeypatch):
    monkeypatch.setattr(loader, "_multiplies_fp8", lambda device: False)
    quantisation = quantisation_of("fp8", None, False)
    with pytest.raises(ConfigError, match=r"needs a GPU of compute capability 8\.9 or more; choose int8"):
        load_model(served("llama").model_dir, torch.float32, torch.device("cuda"), quantisation=quantisation)


def test_mxfp4_means_the_same_on_any_device():
    form = quantised.format_of("mxfp4", 32)
    data, scale = torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8)
    held = quantised.QuantisedOperand(form, data.to("meta"), scale.to("meta"))
    assert quantised.dequantise(held, 4, 64, torch.bfloat16).device.type == "meta"


def test_weights_that_are_not_finite_are_named(tmp_path):
    model_dir = make_checkpoint("llama", tmp_path)
    tensors = load_file(model_dir / SINGLE_NAME)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    save_file(tensors, model_dir / SINGLE_NAME)
    with pytest.raises(
        ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight in .* can't be quantised: .* not finite"
    ):
        load_model(model_dir, torch.float32, CPU, quantisation=INT8)


DYNAMIC = [quantisation_of("int8-dynamic", None, False), quantisation_of("int4-dynamic", 32, False)]
QUICK_DYNAMIC = [("qwen3_moe", DYNAMIC[0]), ("mixtral", DYNAMIC[1])]
DYNAMIC_ERROR = {"int8-dynamic": 0.02, "int4-dynamic": 1e-5}
"""Of half of all positions at least: root mean square by that of logits.  torchao's symmetric rows map their
largest input to 127.5: where it is negative its last bit decides between -127 and -128.
"""
MAX_DYNAMIC_ERROR = 0.05
"""Of all positions.  Layers elsewhere add in another order than ours, which depends on the processor too.
Where that carries one input over a step of 8 bits, this position and those after it differ by that.
"""
MIN_SAME_EXPERTS = 0.9
"""Share of a layer's positions whose experts are torchao's.  Others are near ties of the gate, which that
noise decides: in logits each is an error of 20 to 60 %.
"""


def choose_as(theirs: list[torch.Tensor], shares: list[float], monkeypatch) -> None:
    """Have each layer's gate choose these experts [T, K]; `shares` gets the share of its own equal choices.

    Phi-3.5-MoE's gate has weights of its own choice alone, and keeps it.
    """
    largest, left = MoeMlp.largest, iter(theirs)

    def choose(mlp, scores):
        own, given = largest(mlp, scores)[1], next(left)
        shares.append((own.sort(-1).values == given.sort(-1).values).all(-1).float().mean().item())
        has_weights = scores.gather(-1, given).isfinite().all(-1, keepdim=True)
        ids = torch.where(has_weights, given, own)
        return scores.gather(-1, ids), ids

    monkeypatch.setattr(MoeMlp, "largest", choose)


@pytest.mark.parametrize(
    ("family", "quantisation"),
    [
        *(
            pytest.param(*one.values, marks=() if one.values in QUICK_DYNAMIC else pytest.mark.slow)
            for one in diagonal(FAMILIES, DYNAMIC)
        ),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in product(LATER_FAMILIES, DYNAMIC)),
    ],
    ids=lambda one: one if isinstance(one, str) else one.form.name,
)
def test_dynamic_logits_of_a_mixed_batch_are_those_of_torchao(
    family, quantisation, base, tmp_path, monkeypatch
):
    """By torchao's choice of experts: a near tie of a gate does not decide."""
    model_dir, _ = base(family)
    targets = ("qkv", "o", "delta_qkvz", "delta_out")
    adapters = [
        make_adapter(family, model_dir, tmp_path / str(n), n, targets, seed=n, scale=0.7) for n in (4, 8)
    ]
    prompts = make_prompts()
    expected, chosen = zip(
        *(
            torchao_logits(model_dir, None if slot < 0 else adapters[slot], quantisation, prompt)
            for slot, prompt in zip(SLOTS, prompts, strict=True)
        ),
        strict=True,
    )
    theirs = [torch.cat(layer) for layer in zip(*chosen, strict=True)]
    shares: list[float] = []
    choose_as(theirs, shares, monkeypatch)
    _, found = Harness(model_dir, adapters, quantisation=quantisation).prefill(prompts, SLOTS)
    assert len(shares) == len(theirs)
    assert min(shares, default=1.0) >= MIN_SAME_EXPERTS
    wanted = torch.cat(expected)
    errors, size = (torch.cat(found) - wanted).square().mean(-1), wanted.square().mean().sqrt()
    assert errors.median().sqrt() < DYNAMIC_ERROR[quantisation.form.name] * size
    assert errors.mean().sqrt() < MAX_DYNAMIC_ERROR * size
