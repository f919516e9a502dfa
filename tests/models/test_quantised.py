"""A quantised base against transformers and peft over the weights that it stands for."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_lora.core.errors import ConfigError
from moe_lora.models.loader import SINGLE_NAME, load_model
from moe_lora.models.quantised_weight import QuantisedWeight, quantisation_of
from tests.families import FAMILIES, make_adapter, make_checkpoint
from tests.oracle import greedy_reference, reference_logits
from tests.quantised import dequantised, dequantised_checkpoint, torchao_logits

from .harness import Harness
from .test_oracle import MAX_LOGIT_DIFFERENCE, make_prompts

CPU = torch.device("cpu")
INT8 = quantisation_of("int8", None, False)
INT4 = quantisation_of("int4", 32, False)
SLOTS = (-1, 0, 1, -1, 0, 1, -1)
NUM_TOKENS = 32
SEEDS = {"llama": 2, "mixtral": 1, "qwen3_moe": 3, "gpt_oss": 0, "dbrx": 0}
SIZES = {"dbrx": {"ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}}}
"""Inner sizes that groups of 32 divide."""


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """family → a tiny checkpoint with two adapters, on attention and experts, one on the gate too."""
    made = {}

    def make(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            changes = SIZES.get(family, {"intermediate_size": 32})
            if family == "qwen3_moe":
                changes = {"moe_intermediate_size": 32}
            model = make_checkpoint(family, folder / "base", seed=SEEDS[family], **changes)
            gate = ("router",) if family != "llama" else ()
            first = make_adapter(family, model, folder / "first", 4, seed=4)
            targets = ("qkv", "o", "gate_up", "down", *gate)
            made[family] = model, (first, make_adapter(family, model, folder / "second", 8, targets, seed=8))
        return made[family]

    return make


@pytest.mark.parametrize("quantisation", [INT8, INT4], ids=lambda q: q.form.name)
@pytest.mark.parametrize("family", FAMILIES)
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
        greedy = greedy_reference(oracle, adapter, [prompt], NUM_TOKENS)
        greedy.check_margins()
        assert tuple(tokens) == greedy.tokens[0], (slot, len(prompt))


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
    part = load_model(model_dir, torch.float32, CPU, range(1, 3), INT8).layers[1].mlp
    for name in ("gate_up", "down"):
        held, all_ = getattr(part, name).weight, getattr(whole, name).weight
        assert torch.equal(held.data, all_.data[1:3])
        assert torch.equal(held.scale, all_.scale[1:3])


def test_loading_takes_little_more_than_what_stays(tmp_path):
    """One matrix of this model in floating point is larger than what may be there beside the rest."""
    model_dir = make_checkpoint(
        "llama",
        tmp_path / "base",
        dtype=torch.bfloat16,
        hidden_size=1024,
        intermediate_size=8192,
        vocab_size=128,
        num_hidden_layers=4,
    )
    program = f"""
import torch
from pathlib import Path
from moe_lora.models.loader import SINGLE_NAME, load_model
from moe_lora.models.quantised_weight import quantisation_of
from moe_lora.kernels import quantised

quantisation = quantisation_of("int4", 32, False)
quantised.quantise(torch.randn(64, 1024), quantisation.form)
def anonymous(field):
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(field)) * 1024
import threading
peak, done, before = [0], threading.Event(), anonymous("RssAnon")
def watch():
    while not done.wait(0.0005):
        peak[0] = max(peak[0], anonymous("RssAnon"))
thread = threading.Thread(target=watch)
thread.start()
model = load_model(Path({str(model_dir)!r}), torch.bfloat16, torch.device("cpu"), quantisation=quantisation)
done.set()
thread.join()
stays = sum(w.nbytes for w in (*model.parameters(), *model.buffers()))
print(peak[0] - before, stays, max(w.shape.numel() * 2 for w in model.modules() if hasattr(w, "form")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    peak, stays, largest = map(int, done.stdout.split())
    assert largest > stays / 3, "the test is of no use with small matrices"
    assert peak <= 1.1 * stays


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
            r"layers\.0\.mlp\.down\.weight of shape \(32, 24\): its 24 inputs are no multiple of .*=32",
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


def test_device_without_kernels_is_refused(served):
    with pytest.raises(ConfigError, match="runs on CPU only so far, not on cuda"):
        load_model(served("llama").model_dir, torch.float32, torch.device("cuda"), quantisation=INT8)


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
MAX_DYNAMIC_ERROR = {"int8-dynamic": 0.02, "int4-dynamic": 1e-5}
"""Root mean square by that of logits.  torchao's symmetric rows map their largest input to 127.5: where it
is negative its last bit decides between -127 and -128, and layers elsewhere add in another order than ours.
"""


@pytest.mark.parametrize("quantisation", DYNAMIC, ids=lambda q: q.form.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_dynamic_logits_of_a_mixed_batch_are_those_of_torchao(family, quantisation, base, tmp_path):
    model_dir, _ = base(family)
    adapters = [
        make_adapter(family, model_dir, tmp_path / str(n), n, ("qkv", "o"), seed=n, scale=0.7) for n in (4, 8)
    ]
    prompts = make_prompts()
    _, found = Harness(model_dir, adapters, quantisation=quantisation).prefill(prompts, SLOTS)
    errors, sizes = [], []
    for slot, prompt, rows in zip(SLOTS, prompts, found, strict=True):
        expected = torchao_logits(model_dir, None if slot < 0 else adapters[slot], quantisation, prompt)
        errors.append((rows - expected).flatten())
        sizes.append(expected.flatten())
    error, size = torch.cat(errors), torch.cat(sizes).square().mean().sqrt()
    assert error.square().mean().sqrt() < MAX_DYNAMIC_ERROR[quantisation.form.name] * size
