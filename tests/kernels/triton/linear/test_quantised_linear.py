# SPDX-License-Identifier: Apache-2.0
"""Linear layers over quantised weights on a GPU, against a product with the dequantised weights."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from moe_lora.kernels import ops, quantised, reference
from moe_lora.kernels.quantised import QuantisedOperand, format_of
from moe_lora.kernels.triton import configs
from moe_lora.kernels.triton.configs import interpreted
from moe_lora.models.quantised_weight import QuantisedWeight, quantisation_of
from tests.families import make_checkpoint
from tests.kernels.kernel_cases import popularity, random, strided
from tests.models.harness import Harness

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
FORMS = [
    (format_of("int8"), 70, 37, False),
    (format_of("int8", 32), 96, 70, True),
    (format_of("int8", 8), 40, 13, False),
    (format_of("int4", 32), 96, 70, False),
    (format_of("int4", 64), 192, 13, True),
    (format_of("int4", 128), 384, 37, False),
    (format_of("int4", 8), 72, 13, True),
    (format_of("int4"), 70, 13, False),
    (format_of("fp8"), 70, 13, False),
    (format_of("fp8", 128, 128), 300, 200, False),
    (format_of("fp8", 128, 16), 150, 37, False),
    (format_of("mxfp4", 32), 96, 70, False),
]

QUICK = [FORMS[i] for i in (1, 7, 10, 11)]
"""Codes of every format; groups of a few, of a row, of rows; zero points."""
CASES = [
    pytest.param(
        *form,
        dtype,
        marks=() if (form in QUICK if dtype == torch.bfloat16 else form is FORMS[4]) else pytest.mark.slow,
    )
    for form in FORMS
    for dtype in TOLERANCE
]


def ident(case: object) -> str:
    return "-".join(map(str, vars(case).values())) if isinstance(case, quantised.Format) else str(case)


def operand(form, dtype, device, *, width, num_out, zero, experts=3, seed=7):
    """Random values, scales and zero points of a format in any of its codes, of several matrices."""
    generator = torch.Generator().manual_seed(seed)
    sizes, kinds = form.sizes(num_out, width), form.dtypes(dtype)
    data = torch.randint(0, 256, (experts, *sizes[0]), generator=generator).to(torch.uint8)
    if form.name == "fp8":
        data = torch.where(data & 127 == 127, 126, data)  # no NaN
    scale = torch.rand(experts, *sizes[1], generator=generator) / 64
    if form.name == "mxfp4":
        scale = torch.randint(118, 128, scale.shape, generator=generator)
    zeros = torch.randint(-8, 8, (experts, num_out, form.num_groups(width)), generator=generator)
    tensors = data.view(kinds[0]), scale.to(kinds[1]), zeros.to(torch.int8) if zero else None
    return QuantisedOperand(form, *(one if one is None else one.to(device) for one in tensors))


def of_expert(weight, expert):
    """One matrix of several."""
    return QuantisedOperand(weight.form, *(None if one is None else one[expert] for one in weight[1:]))


def multiply(x, weight, bias, ids, num_out):
    from moe_lora.kernels.triton.linear.quantised_linear import quantised_linear

    return quantised_linear(x, weight, bias, ids, num_out)


def assert_product(found, x, weight, bias, ids, num_out):
    """Within one rounding of the product with the dequantised weights, computed in fp64."""
    plain = quantised.dequantise(weight, num_out, x.shape[1], x.dtype).double()
    wide = None if bias is None else bias.double()
    if ids is None:
        exact = reference.linear(x.double(), plain, wide)
    else:
        exact = reference.expert_linear(x.double(), plain, wide, ids)
        assert (found[ids.flatten() < 0] == 0).all()
    assert found.dtype == x.dtype
    tolerance = TOLERANCE[x.dtype]
    size = x.double().norm(dim=1).max() * plain.norm(dim=-1).max()
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=float(size) * 1e-6)


@pytest.mark.parametrize(("form", "width", "num_out", "zero", "dtype"), CASES, ids=ident)
def test_dense_and_expert_layers_compute_with_the_dequantised_weights(
    device, form, width, num_out, zero, dtype
):
    generator = torch.Generator().manual_seed(1)
    weight = operand(form, dtype, device, width=width, num_out=num_out, zero=zero)
    x = strided(random(generator, 5, width, dtype=dtype).to(device), extra=8)
    bias = random(generator, 3, num_out, dtype=dtype).to(device)
    found = multiply(x, of_expert(weight, 1), bias[1], None, num_out)
    assert_product(found, x, of_expert(weight, 1), bias[1], None, num_out)
    ids = torch.randint(-1, 3, (5, 2), generator=generator).int().to(device)
    assert_product(multiply(x, weight, None, ids, num_out), x, weight, None, ids, num_out)


@pytest.mark.parametrize(
    ("kind", "row_per_output"),
    [
        pytest.param(*case, marks=() if case == ("zipf", True) else pytest.mark.slow)
        for case in product(("zipf", "distinct", "uniform", "identical"), (True, False))
    ],
)
def test_rows_of_experts_whichever_they_chose(device, kind, row_per_output):
    """Up to 70 tokens: tiles of few and of many rows, parts of the inputs apart and together."""
    form, width, num_out = format_of("int4", 32), 96, 37
    weight = operand(form, torch.bfloat16, device, width=width, num_out=num_out, zero=False, experts=4)
    generator = torch.Generator().manual_seed(2)
    bias = random(generator, 4, num_out, dtype=torch.bfloat16).to(device)
    for tokens in (1, 9, 70):
        ids = popularity(generator, kind, tokens * 2, 4).view(tokens, 2).to(device)
        rows = tokens * (2 if row_per_output else 1)
        x = random(generator, rows, width, dtype=torch.bfloat16).to(device)
        assert_product(multiply(x, weight, bias, ids, num_out), x, weight, bias, ids, num_out)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("int4", torch.bfloat16),
        pytest.param("int8", torch.float32, marks=pytest.mark.slow),
        pytest.param("int8", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("mxfp4", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_row_has_the_same_bits_in_any_batch(device, name, dtype, monkeypatch):
    """Alone its parts are summed by programs of their own, in a large batch by one."""
    from moe_lora.kernels.triton.linear import quantised_linear as module

    rows, num_out, width = 70, 1100, 4096
    if interpreted():  # numpy's product of tiles of another size adds in another order
        monkeypatch.setattr(module, "_MANY_ROWS", 16)
        rows, num_out, width = 24, 70, 128
    form = format_of(name, {"int8": 0, "int4": 64, "mxfp4": 32}[name])
    weight = operand(form, dtype, device, width=width, num_out=num_out, zero=False, experts=2)
    x = random(torch.Generator().manual_seed(3), rows, width, dtype=dtype).to(device)
    ids = (torch.arange(2 * rows) % 3 - 1).int().view(rows, 2).to(device)
    together = multiply(x, of_expert(weight, 0), None, None, num_out)
    of_experts = multiply(x, weight, None, ids, num_out).unflatten(0, (rows, 2))
    for some in (slice(0, 1), slice(rows - 1, rows), slice(3, 17)):
        assert torch.equal(multiply(x[some], of_expert(weight, 0), None, None, num_out), together[some])
        found = multiply(x[some], weight, None, ids[some], num_out)
        assert torch.equal(found.unflatten(0, (-1, 2)), of_experts[some])


def test_weights_of_every_code_are_those_of_the_format(device):
    """Each row of x picks one input, so outputs are weights: exactly scale * q, at extreme scales too."""
    num_out, width = 16, 64
    x = torch.eye(width, dtype=torch.bfloat16).to(device)
    for form in (format_of("int8"), format_of("int4", 64), format_of("fp8"), format_of("mxfp4", 32)):
        sizes, kinds = form.sizes(num_out, width), form.dtypes(torch.bfloat16)
        data = (torch.arange(num_out * sizes[0][1]) % 256).to(torch.uint8).view(sizes[0])
        if form.name == "fp8":
            data = torch.where(data & 127 == 127, 0, data)
        scale = torch.tensor([2.0**-20, 1.0, 3.0e4, 2.0**80])
        if form.name == "mxfp4":
            scale = torch.tensor([5, 100, 127, 240])
        scale = scale.repeat(4)[:, None].expand(num_out, form.num_groups(width)).reshape(sizes[1])
        weight = QuantisedOperand(form, data.view(kinds[0]).to(device), scale.to(device, kinds[1]))
        expected = quantised.dequantise(weight, num_out, width, torch.bfloat16)
        assert torch.equal(multiply(x, weight, None, None, num_out), expected.T), form


def test_operands_that_do_not_fit_are_refused(device):
    form = format_of("int8")
    weight = operand(form, torch.float32, device, width=8, num_out=4, zero=False)
    x, ids = torch.zeros(2, 8, device=device), torch.zeros(2, 2, dtype=torch.int32, device=device)
    one = of_expert(weight, 0)
    dynamic = QuantisedOperand(format_of("int8-dynamic"), one.data, one.scale)
    refused = [
        (lambda: multiply(x.double(), one, None, None, 4), "x is torch.float64"),
        (lambda: multiply(x.T.contiguous().T, one, None, None, 4), "rows of contiguous"),
        (lambda: multiply(x[:, :7], one, None, None, 4), "data of int8 weights with 4 outputs and 7 inputs"),
        (lambda: multiply(x, one, torch.zeros(5, device=device), None, 4), "bias of int8"),
        (lambda: multiply(x, weight._replace(scale=weight.scale.T), None, ids, 4), "scale of int8"),
        (lambda: multiply(x[:1], weight, None, ids, 4), r"x has 1 rows; ids \(2, 2\) need 2 or 4"),
        (lambda: multiply(x, dynamic, None, None, 4), "runs on CPU only; use int8"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.slow
@pytest.mark.skipif(not interpreted(), reason="the model's other operations run on the CPU")
@pytest.mark.parametrize(("family", "quantize"), [("llama", "int8"), ("mixtral", "int4")])
def test_a_model_over_it_gives_the_logits_of_the_cpu_kernels(family, quantize, tmp_path, monkeypatch):
    quantisation = quantisation_of(quantize, 32 if quantize == "int4" else None, False)
    model_dir = make_checkpoint(family, tmp_path, intermediate_size=32)
    prompts, counted = [[5, 40], [9]], []
    _, expected = Harness(model_dir, quantisation=quantisation).prefill(prompts, [-1, -1])

    def on_gpu(held, x, bias, ids=None):
        counted.append(held)
        weight = QuantisedOperand(held.form, held.data, held.scale, held.zero)
        return multiply(x, weight, bias, ids, held.num_out)

    monkeypatch.setattr(ops, "fuses_sites", lambda x: False)  # as off the CPU
    monkeypatch.setattr(QuantisedWeight, "multiply", on_gpu)
    _, found = Harness(model_dir, quantisation=quantisation).prefill(prompts, [-1, -1])
    assert len(set(counted)) == 8
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 1e-4


def test_no_rows_give_no_rows(device):
    weight = operand(format_of("int8"), torch.float32, device, width=8, num_out=4, zero=False, experts=1)
    assert multiply(torch.zeros(0, 8, device=device), of_expert(weight, 0), None, None, 4).shape == (0, 4)


def test_more_programs_at_once_change_no_bit(device, monkeypatch):
    """Whether parts are summed apart depends on the device's size; what is computed does not."""
    from moe_lora.kernels.triton.linear import quantised_linear as module

    weight = operand(format_of("int8"), torch.bfloat16, device, width=128, num_out=100, zero=False)
    x = random(torch.Generator().manual_seed(5), 3, 128, dtype=torch.bfloat16).to(device)
    bias = torch.ones(100, dtype=torch.bfloat16, device=device)
    found, started, start = [], [], configs.start

    def record(kernel, *operands, **meta):
        started.append(meta.get("APART"))
        start(kernel, *operands, **meta)

    monkeypatch.setattr(configs, "start", record)
    for at_once in (1, 8):
        monkeypatch.setattr(configs, "num_programs", lambda *_, at_once=at_once: at_once)
        found.append(module.quantised_linear(x, of_expert(weight, 0), bias, None, 100))
    assert started == [False, True, None]
    assert torch.equal(*found)
