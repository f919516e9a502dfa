# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_lora.core.shard import ModelShard
from moe_lora.families import model_spec
from moe_lora.kernels import ops, reference
from moe_lora.kernels.operands import Zeros
from moe_lora.kernels.triton import configs
from moe_lora.kernels.triton.configs import interpreted
from moe_lora.kernels.triton.linear import experts
from moe_lora.kernels.triton.lora import triton_lora as lora
from moe_lora.kernels.triton.lora.problem import Deltas
from moe_lora.kernels.triton.lora.segments import build_segments, rows_to_sort
from moe_lora.models.linear import Fp32Vector, glu
from moe_lora.models.mlp import MoeMlp
from tests.grids import diagonal, with_quick
from tests.kernels.kernel_cases import popularity, random
from tests.kernels.triton.gpu_cases import GATE_UP, LAYER, TOLERANCE, make_batch

KINDS = ["distinct", "uniform", "zipf", "identical"]
# Experts, experts per token, hidden and inner size, activation, bias: the families' kinds of experts.
MIXTRAL, QWEN3 = (8, 2, 64, 112, "silu", False), (16, 4, 128, 24, "silu", False)
GPT_OSS, DBRX = (4, 3, 96, 45, "swigluoai", True), (8, 4, 37, 80, "silu", False)
FAMILIES = {"mixtral": MIXTRAL, "qwen3_moe": QWEN3, "gpt_oss": GPT_OSS, "dbrx": DBRX}
SILU, CLAMPED = experts.Gate(False, 0.0), experts.Gate(True, 0.7)


def chosen_experts(generator, kind, tokens, num_experts, top_k):
    """[T, K] int32; some rows have none, the last one among them."""
    ids = torch.stack([popularity(generator, kind, tokens, num_experts).roll(k) for k in range(top_k)], 1)
    ids[-1, -1] = -1
    return ids.contiguous()


class Layer:
    """Random experts of a family and rows for them, on a device."""

    def __init__(self, family, dtype, kind, tokens, device, seed=3):
        self.num_experts, top_k, hidden, inner, self.activation, biased = FAMILIES[family]
        g = torch.Generator().manual_seed(seed)
        self.gate = CLAMPED if self.activation == "swigluoai" else SILU

        def made(*shape, scale=1.0):
            return (random(g, *shape) * scale).to(dtype).to(device)

        self.x = made(tokens, hidden)
        self.up = made(self.num_experts, 2 * inner, hidden, scale=hidden**-0.5)
        self.down = made(self.num_experts, hidden, inner, scale=inner**-0.5)
        self.up_bias = made(self.num_experts, 2 * inner) if biased else None
        self.down_bias = made(self.num_experts, hidden) if biased else None
        self.ids = chosen_experts(g, kind, tokens, self.num_experts, top_k).to(device)
        self.weights = torch.rand(tokens, top_k, generator=g).to(device)

    def outputs(self, pick=None):
        """gate_up, its activation, down and the sum of the tokens picked; per token."""
        index = torch.tensor(range(len(self.x)) if pick is None else pick, dtype=torch.long)
        x, ids, weights = (t[index.to(t.device)] for t in (self.x, self.ids, self.weights))
        order = experts.order(ids, self.num_experts)
        gate_up = experts.linear(x, self.up, self.up_bias, ids, order)
        inner = experts.linear(x, self.up, self.up_bias, ids, order, self.gate)
        down = experts.linear(inner, self.down, self.down_bias, ids, order)
        total = experts.weighted_sum(down, weights)
        return [one.unflatten(0, (len(index), -1)) for one in (gate_up, inner, down, total)]

    def exact(self, inner):
        """The same in fp64; down of the inner rows given."""
        wide = [None if one is None else one.double() for one in (self.up_bias, self.down_bias)]
        gate_up = reference.expert_linear(self.x.double(), self.up.double(), wide[0], self.ids)
        down = reference.expert_linear(inner.flatten(0, 1).double(), self.down.double(), wide[1], self.ids)
        return gate_up.unflatten(0, self.ids.shape), down.unflatten(0, self.ids.shape)


def assert_near(actual, expected, dtype):
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GRID = [(BF16, kind) for kind in KINDS] + [(FP32, "uniform"), (FP16, "uniform")]
QUICK = {
    ("qwen3_moe", BF16, "zipf", 2),
    ("gpt_oss", BF16, "zipf", 23),
    ("mixtral", FP32, "uniform", 2),
    ("dbrx", FP32, "uniform", 23),
}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in ((family, *one, tokens) for family in FAMILIES for one in GRID for tokens in (2, 23))
]
"""Tokens that are few, and that are sorted."""


@pytest.mark.parametrize(("family", "dtype", "kind", "tokens"), CASES)
def test_experts_agree_with_fp64(device, family, dtype, kind, tokens):
    layer = Layer(family, dtype, kind, tokens, device)
    assert experts.by_rows(layer.ids, layer.num_experts) == (tokens == 2 and family != "gpt_oss")
    gate_up, inner, down, total = layer.outputs()
    exact_gate_up, exact_down = layer.exact(inner)
    assert_near(gate_up, exact_gate_up, dtype)
    assert_near(inner, glu(gate_up.double(), layer.activation, layer.gate.limit), dtype)
    assert_near(down, exact_down, dtype)
    assert (layer.ids < 0).any()
    assert all((one[layer.ids < 0] == 0).all() for one in (gate_up, inner, down))
    assert_near(total[:, 0], (down.double() * layer.weights[..., None]).sum(1), dtype)


@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_row_has_the_same_bits_alone_as_in_a_sorted_batch(device, family):
    layer = Layer(family, BF16, "zipf", 24, device)
    together = layer.outputs()
    for pick in ([7], [23, 0, 0, 12], list(range(23, 8, -1))):
        for one, whole in zip(layer.outputs(pick), together, strict=True):
            assert torch.equal(one, whole[pick])


@pytest.mark.parametrize("gate", with_quick([SILU, CLAMPED], [CLAMPED]))
def test_activation_in_the_epilogue_has_the_bits_of_one_after_it(device, gate):
    for tokens in (1, 30):
        layer = Layer("gpt_oss", BF16, "uniform", tokens, device)
        order = experts.order(layer.ids, layer.num_experts)
        operands = (layer.x, layer.up, layer.up_bias, layer.ids, order)
        assert torch.equal(experts.linear(*operands, gate), experts.gate(experts.linear(*operands), gate))


def filled(self, *shape, **how):
    """`new_empty` whose memory is NaN."""
    return self.new_full(shape, float("nan") if self.is_floating_point() else 0, **how)


@pytest.mark.parametrize(
    ("gate", "tokens", "first"),
    [
        (SILU, 9, 1),
        (CLAMPED, 1, 0),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in ((SILU, 1, 0), (SILU, 9, 0), (CLAMPED, 9, 0), (CLAMPED, 9, 1))
        ),
    ],
)
def test_deltas_added_before_the_gate_have_the_bits_of_those_added_to_the_output(device, gate, tokens, first):
    """Of rows with and without an adapter, some of which lack a module; of the experts from `first` on."""
    batch = make_batch(GATE_UP, BF16, "uniform", device, tokens=tokens, seed=2)
    batch.slots.lora_rank[0, LAYER, GATE_UP.entry(1, 2)] = 0
    batch.token_slots[0], batch.ids[0, 0] = 0, 2
    batch.ids[batch.ids < first] = -1
    held = torch.where(batch.ids < 0, -1, batch.ids - first).int()
    weight = random(torch.Generator().manual_seed(1), 3, 64, 48, dtype=BF16).to(device)[first:]
    operands = (batch.x, weight, None, held, experts.order(held, 3 - first))
    y = experts.linear(*operands)
    base = y.clone()
    lora.lora_expand(lora.lora_shrink(batch.operands(), decode=True), y)
    assert not torch.equal(base, y)
    shrunk = lora.lora_shrink(batch.operands(), decode=True)
    with patch.object(torch.Tensor, "new_empty", filled):
        deltas = lora.deltas_of(shrunk)
    assert deltas.values.isnan().any()
    deltas = deltas.from_expert(first)
    found = experts.linear(*operands, gate, deltas)
    assert torch.equal(found.view(torch.int16), experts.gate(y, gate).view(torch.int16))
    assert not torch.equal(found, experts.gate(base, gate))
    for values in (deltas.values[1:], deltas.values.float()):
        with pytest.raises(ValueError, match="deltas are"):
            experts.linear(*operands, gate, deltas._replace(values=values))
    with pytest.raises(ValueError, match="before a gate"):
        experts.linear(*operands, None, deltas)


def test_deltas_are_refused_where_tiles_have_no_registers_for_them(device):
    """Those of 128 rows, for more than 80 rows of an expert on average."""
    for rows, taken in ((80, True), (81, False)):
        ids = torch.zeros(rows, 1, dtype=torch.int32, device=device)
        assert experts.adds_deltas(ids, 1) == taken
        x = torch.ones(rows, 16, dtype=BF16, device=device)
        weight = torch.ones(1, 32, 16, dtype=BF16, device=device)
        no_adapter = torch.full((rows,), -1, dtype=torch.int32, device=device)
        deltas = Deltas(x.new_zeros(rows, 32), no_adapter, ids.new_zeros(1), 1, 1)
        operands = (x, weight, None, ids, experts.order(ids, 1), SILU)
        if taken:
            assert torch.equal(experts.linear(*operands, deltas), experts.linear(*operands))
        else:
            with pytest.raises(ValueError, match=r"given for 81 rows of 1 experts.*`adds_deltas` first"):
                experts.linear(*operands, deltas)


def test_deltas_in_fp32_are_added_by_the_kernel_that_scales_them(device):
    batch = make_batch(GATE_UP, FP32, "uniform", device)
    assert lora.deltas_of(lora.lora_shrink(batch.operands(), decode=True)) is None


def test_tiles_of_every_size(device):
    """Many rows of few experts; the last tile of each is not full."""
    for block_t, rows in ((16, 30), (32, 50), (64, 90), (128, 250)):
        ids = torch.tensor([0, 2, 2, 2], dtype=torch.int32, device=device).repeat(-(-rows // 4))[:rows, None]
        assert experts.rows_of_tiles(rows, 3) == block_t
        g = torch.Generator().manual_seed(1)
        x = random(g, rows, 64, dtype=BF16).to(device)
        weight = (random(g, 3, 33, 64) / 8).to(BF16).to(device)
        y = experts.linear(x, weight, None, ids, experts.order(ids, 3))
        assert_near(y, reference.expert_linear(x.double(), weight.double(), None, ids), BF16)


@pytest.mark.parametrize("num_experts", [1, 6])
def test_rows_are_ordered_by_expert_and_as_they_come(device, num_experts):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-2, num_experts + 1, (1500, 2), generator=generator).int().to(device)
    order = experts.order(ids, num_experts)
    inside = (ids >= 0) & (ids < num_experts)
    expert = torch.where(inside, ids, num_experts).flatten()
    assert torch.equal(order[num_experts + 2 :], expert.argsort(stable=True).int())
    counts = torch.bincount(expert, minlength=num_experts + 1).cumsum(0)
    assert torch.equal(order[1 : num_experts + 2], counts.int())
    assert order[0] == 0


def test_no_rows(device):
    layer = Layer("mixtral", BF16, "uniform", 30, device)
    x, ids = layer.x[:0], layer.ids[:0]
    y = experts.linear(x, layer.up, None, ids, experts.order(ids, 8), SILU)
    assert y.shape == (0, layer.up.shape[1] // 2)
    assert experts.weighted_sum(y, layer.weights[:0]).shape == y.shape
    layer.ids.fill_(-1)
    assert all((one == 0).all() for one in layer.outputs())


def test_operands_that_do_not_fit_are_refused(device):
    layer = Layer("gpt_oss", BF16, "uniform", 10, device)
    order = experts.order(layer.ids, 4)
    good = {"x": layer.x, "weight": layer.up, "bias": layer.up_bias, "ids": layer.ids, "order": order}
    experts.linear(**good)
    for wrong in (
        {"x": layer.x.float()},
        {"x": layer.x[:, :90]},
        {"x": layer.x[:9]},
        {"bias": layer.down_bias},
        {"order": order[1:]},
        {"weight": layer.up.transpose(1, 2)},
    ):
        with pytest.raises(ValueError):
            experts.linear(**{**good, **wrong})
    with pytest.raises(ValueError, match="int32"):
        experts.order(layer.ids.long(), 4)


class LoraSites:
    """Answers a layer's LoRA operations: adds `value` to the first rows of a site, if to any."""

    def __init__(self, rows):
        self.rows, self.added, self.zeros = rows, 0, Zeros()

    def lora_begin(self, layer, site, x, ids):
        pass

    def rows_to_sort(self, layer, site, x, ids):
        return None

    def has_deltas(self, layer, site):
        return bool(self.rows)

    def deltas_before(self, layer, site):
        return None

    def lora_add_to(self, layer, site, y):
        self.added += bool(self.rows)
        y[: self.rows] += 0.5


@torch.no_grad()
def moe(family, device):
    num_experts, top_k, hidden, inner, *_ = FAMILIES[family]
    config = {
        "model_type": family,
        "vocab_size": 8,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "moe_intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_local_experts": num_experts,
        "num_experts": num_experts,
        "num_experts_per_tok": top_k,
        "max_position_embeddings": 64,
        "norm_topk_prob": True,
    }
    if family == "dbrx":
        config |= {"d_model": hidden, "n_heads": 1, "n_layers": 1, "max_seq_len": 64}
        config["ffn_config"] = {"ffn_hidden_size": inner, "moe_num_experts": num_experts, "moe_top_k": top_k}
        config["attn_config"] = {"kv_n_heads": 1}
    spec = model_spec(config)
    made = MoeMlp(spec, ModelShard(spec.shape)).bfloat16()
    generator = torch.Generator().manual_seed(5)
    for one in made.parameters():
        one.copy_(random(generator, *one.shape) / one.shape[-1] ** 0.5)
    return made.to(device), random(generator, 20, hidden, dtype=BF16).to(device)


@pytest.mark.parametrize(
    "family",
    ["gpt_oss", *(pytest.param(one, marks=pytest.mark.slow) for one in ("mixtral", "qwen3_moe", "dbrx"))],
)
@torch.inference_mode()
def test_layer_computes_its_experts_by_these_kernels(device, family, monkeypatch):
    """As the CPU library does, with deltas or not; rows without one have the bits of a step without any."""
    layer, x = moe(family, device)
    live = torch.arange(20, device=device) < 18
    monkeypatch.setattr(ops, "fuses_sites", lambda x: False)  # as off the CPU
    outs = []
    for rows in (0, 4):
        handler = LoraSites(rows)
        [channel] = ops.open_channels(handler, 1)
        logits = layer.gate(x, channel)
        chosen, first = layer.choose(logits, live, channel)[:2], handler.added
        monkeypatch.setattr(MoeMlp, "choose", lambda *_, made=(*chosen, None): made)
        expected = layer(x, channel, live)
        added = handler.added
        order = experts.order(chosen[1], len(layer.experts))
        monkeypatch.setattr(MoeMlp, "choose", lambda *_, made=(*chosen, order): made)
        outs.append(layer(x, channel, live))
        monkeypatch.undo()
        monkeypatch.setattr(ops, "fuses_sites", lambda x: False)
        assert handler.added - first == 2 * (added - first) == (6 if rows else 0)
        assert (expected[18:] == 0).all()
        torch.testing.assert_close(outs[-1], expected, rtol=2e-2, atol=2e-2)
    assert not torch.equal(outs[0][:4], outs[1][:4])
    assert torch.equal(outs[0][4:], outs[1][4:])


KINDS = ("topk_softmax", "softmax_topk", "sigmoid_topk")
CHOICE_OF_TWO = experts.GateChoice(2, KINDS.index("sigmoid_topk"), 1.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", [None, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_experts_are_chosen_as_by_torch(device, kind, norm, dtype):
    layer, _ = moe("qwen3_moe", device)
    layer.gate_kind, layer.gate_norm, layer.top_k = kind, norm, 3
    logits = random(torch.Generator().manual_seed(2), 5, 13, dtype=dtype)
    live = torch.tensor([True, True, False, True, True])
    weights, ids, _ = layer.choose(logits, live, None)
    choice = experts.GateChoice(3, KINDS.index(kind), layer.gate_norm or 0.0)
    found = experts.choose(logits.to(device), live.to(device), choice)
    assert torch.equal(found[1].cpu(), ids)
    torch.testing.assert_close(found[0].cpu(), weights)


def test_sigmoids_of_zero_give_weights_of_zero(device):
    layer, _ = moe("qwen3_moe", device)
    layer.gate_kind, layer.top_k = "sigmoid_topk", 2
    logits = torch.full((1, 8), -200.0)
    weights, _, _ = layer.choose(logits, torch.ones(1, dtype=torch.bool), None)
    found = experts.choose(logits.to(device), torch.ones(1, dtype=torch.bool, device=device), CHOICE_OF_TWO)
    assert torch.equal(found[0].cpu(), weights)
    assert not weights.any()


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize(
    ("num_experts", "num_groups", "top_groups", "top_k"),
    [(13, 1, 1, 3), (8, 4, 2, 3), (15, 5, 1, 3), (24, 3, 2, 9), (64, 8, 4, 8), (6, 3, 3, 6)],
)
def test_corrected_choices_within_groups_are_those_of_torch(
    device, kind, num_experts, num_groups, top_groups, top_k
):
    """Chosen by the corrected score, weighted by the score, scaled; negative corrections are larger."""
    generator = torch.Generator().manual_seed(num_experts)
    logits, bias = random(generator, 7, num_experts), random(generator, num_experts)
    layer, _ = moe("qwen3_moe", device)
    layer.gate_kind, layer.gate_norm, layer.top_k, layer.scale = kind, 1.0, top_k, 1.7
    layer.groups, layer.correction = (num_groups, top_groups), Fp32Vector(num_experts)
    layer.correction.weight.data = bias
    live = torch.ones(7, dtype=torch.bool)
    weights, ids, _ = layer.choose(logits, live, None)
    choice = experts.GateChoice(top_k, KINDS.index(kind), 1.0, num_groups, top_groups, 1.7)
    found = experts.choose(logits.to(device), live.to(device), choice, bias.to(device))
    assert torch.equal(found[1].cpu(), ids)
    torch.testing.assert_close(found[0].cpu(), weights)


def test_choices_that_do_not_fit_are_refused(device):
    logits, live = torch.zeros(2, 8, device=device), torch.ones(2, dtype=torch.bool, device=device)
    for groups in ((3, 1), (8, 4), (4, 1), (2, 3)):
        with pytest.raises(ValueError, match="does not fit 8 experts"):
            experts.choose(logits, live, experts.GateChoice(3, 2, 1.0, *groups))
    with pytest.raises(ValueError, match="fp32 of E fits"):
        experts.choose(logits, live, experts.GateChoice(3, 2), torch.zeros(8, dtype=BF16, device=device))


def test_chosen_experts_are_different_ones_whatever_the_logits_are(device):
    """Of equal ones the first; what is no number comes last."""
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[1.0, 2, 2, 2, 0], [nan, 1, nan, nan, nan], [-inf] * 5]).to(device)
    live = torch.ones(3, dtype=torch.bool, device=device)
    for scores in (1, 0):
        _, ids = experts.choose(logits, live, experts.GateChoice(2, scores, 1.0))
        assert ids.tolist() == [[1, 2], [0, 1], [0, 1]]
    with pytest.raises(ValueError, match="top_k=6"):
        experts.choose(logits, live, experts.GateChoice(6, 1, 1.0))


def test_layer_on_cuda_orders_its_rows_for_these_kernels():
    """Seen on tensors without memory; where there is an order, the test above says what follows."""
    layer, _ = moe("mixtral", torch.device("cpu"))
    with FakeTensorMode():
        for device, wanted in (("cuda", (8 + 2 + 18,)), ("cpu", None)):
            logits, live = torch.empty(9, 8, device=device), torch.ones(9, dtype=torch.bool, device=device)
            order = layer.choose(logits, live, torch.empty(3, dtype=torch.int64))[2]
            assert wanted == (order if order is None else order.shape)


CHOICES = [
    (1, 5, 1, range(0)),
    (23, 5, 1, range(5)),
    (9, 13, 2, range(4, 13)),
    (37, 4, 4, range(4)),
    (3, 64, 8, range(64)),
    (40, 9, 8, range(9)),
]


@pytest.mark.parametrize(("choice", "tile_rows"), diagonal(CHOICES, (None, 0, 4)))
def test_one_launch_chooses_and_orders_as_the_launches_of_each_do(device, choice, tile_rows, monkeypatch):
    """And sorts rows of LoRA, cut into tiles or not, some tokens being padding or without adapter."""
    tokens, num_experts, top_k, held = choice
    generator = torch.Generator().manual_seed(tokens)
    logits = random(generator, tokens, num_experts, dtype=BF16).to(device)
    live = (torch.rand(tokens, generator=generator) < 0.8).to(device)
    slots = torch.randint(-1, 3, (tokens,), generator=generator).int().to(device)
    zeros, asked, started, start = Zeros(), [], [], configs.start

    def to_sort(ids):
        asked.append(rows_to_sort(slots, ids, 3, num_experts, tile_rows, zeros))
        return asked[-1]

    def note(kernel, *given, **meta):
        started.append(kernel.__name__)
        start(kernel, *given, **meta)

    monkeypatch.setattr(configs, "start", note)
    given = (logits, live, experts.GateChoice(top_k, 1, 1.0), None)
    weights, ids, order = experts.choose_and_order(
        *given, held, zeros, None if tile_rows is None else to_sort
    )
    apart = experts.by_rows(ids, len(held)) or not held
    one_alone = apart and tile_rows is None
    assert started == ["choose_experts" if one_alone else "choose_and_order"]
    expected = experts.choose(*given)
    assert torch.equal(weights, expected[0])
    assert torch.equal(ids, expected[1])
    if not apart:
        assert torch.equal(order, experts.order(ids, len(held), held.start))
    for rows in asked:
        one, other = rows.segments, build_segments(slots, ids, 3, num_experts)
        assert all(
            torch.equal(getattr(one, name), getattr(other, name)) for name in ("rows", "described", "count")
        )
        tiles, others = one.tiles(4), other.tiles(4)
        assert torch.equal(tiles.num, others.num)
        assert torch.equal(tiles.table[: int(tiles.num)], others.table[: int(tiles.num)])


def test_many_rows_are_chosen_and_ordered_by_a_launch_each(device, monkeypatch):
    monkeypatch.setattr(experts, "ONE_LAUNCH_MAX_ROWS", 20)
    logits = random(torch.Generator().manual_seed(1), 11, 6).to(device)
    live = torch.ones(11, dtype=torch.bool, device=device)
    given = (logits, live, experts.GateChoice(2, 0), None)
    _, ids, order = experts.choose_and_order(*given, range(2, 6), Zeros(), pytest.fail)
    assert torch.equal(ids, experts.choose(*given)[1])
    expected = torch.where(ids < 2, 4, ids - 2).flatten().argsort(stable=True)
    assert torch.equal(order[4 + 2 :], expected.int())


@pytest.mark.parametrize("top_k", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_sum_over_experts_is_in_their_order_to_a_compiler_too(device, top_k, dtype):
    """The bits of the kernel."""
    generator = torch.Generator().manual_seed(top_k)
    y = random(generator, 5 * top_k, 37, dtype=dtype).to(device)
    weights = torch.rand(5, top_k, generator=generator).to(device)
    total = reference.sum_experts(y, weights)
    assert total.dtype == dtype
    if interpreted():  # where a product and a sum are rounded apart
        assert torch.equal(total, experts.weighted_sum(y, weights))
    assert_near(total, (y.view(5, top_k, 37).double() * weights[..., None]).sum(1), dtype)


@pytest.mark.parametrize(
    ("tokens", "width", "columns", "stages"),
    [
        (1, 2048, 768, 6),
        (4, 2048, 768, 4),  # 384 items of short rows: a second wave of 264 programs
        (1, 768, 2048, 6),
        (4, 768, 2048, 4),
        (4, 2880, 2880, 6),
    ],
)
def test_few_rows_have_more_on_the_way_where_they_fill_the_device_or_are_wide(tokens, width, columns, stages):
    """As an H200 had them fastest, of 132 SMs."""
    top_k, found = 8, []
    x, weight = (
        torch.empty(tokens, width, dtype=torch.bfloat16),
        torch.empty(64, columns, width, dtype=torch.bfloat16),
    )
    ids = torch.zeros(tokens, top_k, dtype=torch.int32)

    def note(kernel, programs, *operands, **meta):
        found.append((programs, meta["STAGES"], meta["num_warps"]))

    with patch.object(configs, "start", note), patch.object(configs, "_INTERPRETED_SMS", 132):
        experts.linear(x, weight, None, ids, experts.order(ids, 64))
    items = tokens * top_k * -(-columns // 64)
    assert found == [(min(items, 132 * (2 if stages == 6 else 3)), stages, 8 if stages == 6 else 4)]


def test_rows_that_tensor_cores_do_not_take_whole_keep_their_launch():
    for dtype, width in ((torch.float32, 2048), (torch.bfloat16, 1001)):
        usual = experts.tile_config(dtype, width, 16, False)._replace(group=64)
        assert {experts.row_config(dtype, width, False, one) for one in (False, True)} == {usual}
