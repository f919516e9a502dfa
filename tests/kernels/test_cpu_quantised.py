# SPDX-License-Identifier: Apache-2.0
"""Linear layers over quantised weights, against torchao and against the same layers over plain weights."""

from __future__ import annotations

import itertools

import pytest
import torch
from torchao.quantization import Int8Tensor, IntxUnpackedToInt8Tensor
from torchao.quantization.granularity import PerRow
from torchao.quantization.quantize_.workflows.int8.int8_tensor import QuantizeTensorToInt8Kwargs

from moe_lora.kernels import ops, quantised, reference
from moe_lora.kernels.cpu import cpu
from moe_lora.kernels.quantised import Format, QuantisedOperand, format_of
from tests.grids import diagonal

from .kernel_cases import popularity, random, strided

ROWS = [1, 2, 3, 4, 5, 8, 12, 16, 17, 64]
FORMS = [format_of("int8", 0), *(format_of("int4", group) for group in (32, 64, 128))]
WIDTHS = {0: [(64, 32), (77, 13), (33, 1), (256, 70), (7, 5)], 32: [(32, 5), (96, 70)]}
WIDTHS |= {64: [(64, 13), (192, 1)], 128: [(128, 7), (384, 33)]}
CASES = [(form, *size) for form in FORMS for size in WIDTHS[form.group_size]]
DYNAMIC = [format_of("int8-dynamic", 0), *(format_of("int4-dynamic", group) for group in (32, 64, 128))]
DYNAMIC_CASES = [(form, *size) for form in DYNAMIC for size in WIDTHS[form.group_size]]
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-7}
"""Of a result: the reference is rounded once, torchao's int8 product before
the weights' scale and once after."""


def ident(case: object) -> str:
    return f"{case.name}-{case.group_size}" if isinstance(case, Format) else str(case)


PACKED = [
    *((Format("fp8"), *size, False) for size in [(70, 13), (33, 1), (7, 5), (256, 70)]),
    *((Format("fp8", 128, 128), *size, False) for size in [(300, 150), (128, 64)]),
    (Format("fp8", 16, 16), 70, 37, False),  # groups that no vector fits
    *((Format("int8", *group), 512, 70, False) for group in [(), (64,)]),  # -128 too
    *((Format("int8", *group), 96, 37, zeros) for group in [(), (16,), (32,)] for zeros in (False, True)),
    *((Format("int4", group), 192, 37, zeros) for group in (8, 32, 64) for zeros in (False, True)),
    *((Format("int4", width), width, 13, zeros) for width in (40, 48, 100) for zeros in (False, True)),
    *((Format("mxfp4", 32), *size, False) for size in [(96, 13), (192, 70), (32, 1)]),
]


def random_held(form, experts, width, num_out, generator, *, zero=False, wide=False, dtype=torch.float32):
    """Any values and scales of a format, of E matrices.  wide: scales in fp32 whatever the dtype."""
    sizes, kinds = form.sizes(num_out, width), form.dtypes(torch.float32 if wide else dtype)
    data = torch.randint(0, 256, (experts, *sizes[0]), generator=generator).to(torch.uint8)
    if form.name == "fp8":
        data[data % 128 == 127] = 126  # not a number
    scale = torch.rand(experts, *sizes[1], generator=generator)
    if form.name == "mxfp4":
        scale = torch.randint(120, 130, scale.shape, generator=generator)
    zeros = torch.randint(-8, 8, (experts, num_out, form.num_groups(width)), generator=generator)
    return QuantisedOperand(
        form, data.view(kinds[0]), scale.to(kinds[1]), zeros.to(torch.int8) if zero else None
    )


EXTREME_SCALES = [[0.0, 2.0**-100, 0.3, 2.0**91], [0.0, 1e-40, 2.0**-100, 0.3, 2.0**100, 1e37]]
"""Within the limits of the vectors; with subnormal numbers and products beyond the largest number."""
POPULARITIES = diagonal(("distinct", "uniform", "zipf", "identical"), (True, False))


@pytest.mark.parametrize(("form", "width", "num_out", "with_zeros"), PACKED, ids=ident)
def test_formats_of_checkpoints_have_the_bits_of_the_dequantised_weights(
    isa, dtype, generator, form, width, num_out, with_zeros
):
    """Dense and experts, rows alone and together, scales of the model's dtype and wider."""
    weight = random_held(form, 3, width, num_out, generator, zero=with_zeros, wide=with_zeros, dtype=dtype)
    plain = quantised.dequantise(weight, num_out, width, dtype)
    bias = random(generator, 3, num_out, dtype=dtype)
    matrix = weight._replace(
        data=weight.data[1], scale=weight.scale[1], zero=weight.zero[1] if with_zeros else None
    )
    for rows in (1, 2, 4, 5, 7, 8, 9, 12, 13, 17):
        x = strided(random(generator, rows, width, dtype=dtype))
        ids = torch.randint(-1, 3, (rows, 2), generator=generator).int()
        found = cpu.quantised_linear(x, weight, bias, ids, num_out)
        assert torch.equal(found, cpu.expert_linear(x, plain, bias, ids)), rows
        dense = cpu.quantised_linear(x, matrix, bias[1], None, num_out)
        assert torch.equal(dense, cpu.linear(x, plain[1], bias[1])), rows
        alone = cpu.quantised_linear(x[:1], matrix, bias[1], None, num_out)
        assert torch.equal(alone, dense[:1])


@pytest.mark.parametrize("scales", EXTREME_SCALES)
@pytest.mark.parametrize("form", [Format("int8"), Format("int8", 64), Format("fp8")], ids=ident)
def test_extreme_scales_have_the_bits_of_the_dequantised_weights(isa, dtype, generator, form, scales):
    """Inputs are near one: AVX-512 takes subnormal weights as zeros, which larger inputs would show."""
    weight = random_held(form, 1, 128, len(scales), generator, dtype=torch.float32)
    scale = torch.tensor(scales)[:, None].expand(len(scales), form.num_groups(128))
    matrix = weight._replace(
        data=weight.data[0], scale=scale.reshape(weight.scale.shape[1:]).to(weight.scale.dtype).contiguous()
    )
    plain = quantised.dequantise(matrix, len(scales), 128, dtype)
    for rows in (1, 5, 9, 13, 20):
        x = random(generator, rows, 128, dtype=dtype)
        found = cpu.quantised_linear(x, matrix, None, None, len(scales))
        assert torch.equal(found.nan_to_num(-1), cpu.linear(x, plain, None).nan_to_num(-1)), rows


def test_every_code_and_exponent_means_what_torch_says(isa, dtype):
    """Inputs of one 1 each give the weights themselves."""
    codes = torch.arange(256).to(torch.uint8).view(8, 32)
    weights = [
        QuantisedOperand(Format("fp8"), codes.view(torch.float8_e4m3fn), torch.full((8, 1), 0.3)),
        QuantisedOperand(Format("int8"), codes.view(torch.int8), torch.full((8,), 0.3)),
        QuantisedOperand(
            Format("mxfp4", 32),
            torch.arange(32).mul(7).to(torch.uint8).expand(250, 32).contiguous(),
            torch.arange(250).to(torch.uint8)[:, None],
        ),
    ]
    for weight in weights:
        num_out = weight.data.shape[0]
        plain = quantised.dequantise(weight, num_out, 32, dtype)
        for rows in (range(32), range(3), range(17, 29)):
            x = torch.eye(32, dtype=dtype)[rows.start : rows.stop]
            found = cpu.quantised_linear(x, weight, None, None, num_out)
            assert torch.equal(found.nan_to_num(-1), cpu.linear(x, plain, None).nan_to_num(-1))
        assert found.isnan().any() == (weight.form.name == "fp8")


def test_expert_that_is_not_there_is_refused_in_every_format(generator):
    weight = random_held(Format("fp8"), 3, 8, 4, generator)
    with pytest.raises(ValueError, match=r"outside -1 \.\. 2"):
        cpu.quantised_linear(torch.zeros(1, 8), weight, None, torch.tensor([[3]]).int(), 4)


def held(form: Format, weight: torch.Tensor) -> QuantisedOperand:
    """The matrix, or each of several, quantised and put in two parts."""
    sizes, dtypes = form.sizes(*weight.shape[-2:]), form.dtypes(weight.dtype)
    data, scale = (
        torch.empty(*weight.shape[:-2], *size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)
    )
    for matrix in [()] if weight.dim() == 2 else range(weight.shape[0]):
        for first, part in zip((0, 3), (weight[matrix][:3], weight[matrix][3:]), strict=True):
            if part.numel():
                q, scales = quantised.quantise(part.contiguous(), form)
                quantised.put(form, q, scales, data[matrix], scale[matrix], first)
    return QuantisedOperand(form, data, scale)


@pytest.mark.parametrize(("form", "width", "num_out"), CASES + DYNAMIC_CASES, ids=ident)
def test_what_is_held_is_what_torchao_holds(dtype, generator, form, width, num_out):
    weight = random(generator, num_out, width, dtype=dtype)
    operand = held(form, weight)
    if form.bits == 8:
        expected = Int8Tensor.from_hp(weight, PerRow())
    else:
        expected = IntxUnpackedToInt8Tensor.from_hp(weight, (1, form.group_size), torch.int4)
    q, scale = quantised.unpack(operand, num_out, width)
    assert torch.equal(q, expected.qdata)
    assert torch.equal(scale, expected.scale)
    assert torch.equal(quantised.dequantise(operand, num_out, width, dtype), expected.dequantize())


@pytest.mark.parametrize(("form", "width", "num_out"), CASES, ids=ident)
def test_linear_has_the_bits_of_the_dequantised_weights(isa, dtype, generator, form, width, num_out):
    weight = random(generator, num_out, width, dtype=dtype)
    operand = held(form, weight)
    plain = quantised.dequantise(operand, num_out, width, dtype)
    for rows, bias in itertools.product(ROWS, [None, random(generator, num_out, dtype=dtype)]):
        x = strided(random(generator, rows, width, dtype=dtype))
        found = cpu.quantised_linear(x, operand, bias, None, num_out)
        assert found.dtype == dtype
        assert torch.equal(found, cpu.linear(x, plain, bias)), rows


@pytest.mark.parametrize(("kind", "row_per_output"), POPULARITIES)
@pytest.mark.parametrize("form", [FORMS[0], FORMS[1]], ids=ident)
def test_experts_have_the_bits_of_the_dequantised_weights(isa, dtype, generator, form, kind, row_per_output):
    experts, width, num_out = 6, 96, 37
    weight = random(generator, experts, num_out, width, dtype=dtype)
    operand = held(form, weight)
    plain = quantised.dequantise(operand, num_out, width, dtype)
    for rows, bias in itertools.product(ROWS, [None, random(generator, experts, num_out, dtype=dtype)]):
        ids = popularity(generator, kind, rows * 2, experts).view(rows, 2)
        x = strided(random(generator, rows * (2 if row_per_output else 1), width, dtype=dtype))
        found = cpu.quantised_linear(x, operand, bias, ids, num_out)
        assert torch.equal(found, cpu.expert_linear(x, plain, bias, ids)), rows
        assert (found[ids.flatten() == -1] == 0).all()


@pytest.mark.parametrize("form", [FORMS[0], FORMS[2], format_of("fp8"), DYNAMIC[0], DYNAMIC[2]], ids=ident)
def test_wide_layers_are_bit_identical_in_any_batch_on_any_number_of_threads(isa, dtype, generator, form):
    """Wide enough that weights are unpacked in blocks and shared out to threads."""
    x, weight = random(generator, 130, 1024, dtype=dtype), random(generator, 515, 1024, dtype=dtype)
    operand = held(form, weight)
    together = cpu.quantised_linear(x, operand, None, None, 515)
    torch.set_num_threads(2)
    for rows in (1, 2, 4, 5, 16, 40, 70):
        assert torch.equal(cpu.quantised_linear(x[:rows], operand, None, None, 515), together[:rows])


@pytest.mark.parametrize("with_zeros", [False, True])
@pytest.mark.parametrize(
    ("form", "width"),
    [
        (Format("int8"), 1000),
        (Format("int8"), 1024),
        (Format("int8", 96), 960),
        (Format("fp8", 64), 640),
        (Format("fp8", 64, 64), 1280),
        (Format("fp8", 128, 128), 900),
        (Format("fp8", 128, 128), 896),
        (Format("int4", 64), 640),
        (Format("int4", 96), 960),
        (Format("int4", 512), 1536),
        (Format("int4", 1000), 1000),
        (Format("mxfp4", 32), 608),
    ],
    ids=ident,
)
def test_many_rows_of_wide_layers_have_the_bits_of_the_dequantised_weights(
    isa, generator, form, width, with_zeros
):
    """Widths and rows that end inside a tile, a panel and a block of unpacked weights."""
    if with_zeros and form.name not in ("int8", "int4"):
        pytest.skip("formats of floats have no zeros")
    num_out, dtype = 70, torch.bfloat16
    weight = random_held(form, 2, width, num_out, generator, zero=with_zeros, dtype=dtype)
    plain = quantised.dequantise(weight, num_out, width, dtype)
    bias = random(generator, 2, num_out, dtype=dtype)
    for rows in (2, 10, 17, 34, 41, 51, 131):
        x = random(generator, rows, width, dtype=dtype)
        ids = torch.zeros(rows, 1, dtype=torch.int32)
        ids[rows // 3] = 1
        found = cpu.quantised_linear(x, weight, bias, ids, num_out)
        assert torch.equal(found, cpu.expert_linear(x, plain, bias, ids)), rows


@pytest.mark.parametrize("form", [FORMS[0], FORMS[1]], ids=ident)
def test_more_rows_than_the_library_takes_are_computed_over_dequantised_weights(generator, form):
    weight = random(generator, 40, 64)
    x = random(generator, cpu.QUANTISED_MAX_ROWS[torch.float32] + 1, 64)
    operand = held(form, weight)
    found = ops.quantised_linear(x, *operand[1:], None, None, form.text, 40)
    assert torch.equal(found, reference.quantised_linear(x, operand, None, None, 40))


def test_operands_that_do_not_fit_are_refused(generator):
    form = FORMS[0]
    x, operand = torch.zeros(2, 8), held(form, random(generator, 4, 8))
    bank, ids = held(form, random(generator, 3, 4, 8)), torch.zeros(2, 2, dtype=torch.int32)
    refused = [
        lambda: cpu.quantised_linear(x.half(), operand, None, None, 4),
        lambda: cpu.quantised_linear(torch.zeros(2, 9), operand, None, None, 4),
        lambda: cpu.quantised_linear(x, operand, None, None, 5),
        lambda: cpu.quantised_linear(x, operand, torch.zeros(5), None, 4),
        lambda: cpu.quantised_linear(x, operand._replace(scale=torch.zeros(5)), None, None, 4),
        lambda: cpu.quantised_linear(x, operand._replace(data=operand.data.T), None, None, 4),
        lambda: cpu.quantised_linear(x, operand._replace(data=operand.data.short()), None, None, 4),
        lambda: cpu.quantised_linear(x, operand._replace(zero=torch.zeros(4, 2).char()), None, None, 4),
        lambda: cpu.quantised_linear(x, operand._replace(scale=operand.scale.bfloat16()), None, None, 4),
        lambda: cpu.quantised_linear(x, bank, None, ids + 3, 4),
        lambda: cpu.quantised_linear(x, bank, None, ids.long(), 4),
        lambda: cpu.quantised_linear(torch.zeros(3, 8), bank, None, ids, 4),
    ]
    for call in refused:
        with pytest.raises(ValueError):
            call()


def awkward_rows(generator: torch.Generator, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of several sizes, one of zeros, one of one sign only."""
    x = random(generator, rows, width) * torch.logspace(-3, 3, rows)[:, None]
    x[rows // 2] = 0
    x[-1].abs_()
    return x.to(dtype)


@pytest.mark.parametrize(("width", "num_out"), WIDTHS[0])
def test_int8_dynamic_has_the_bits_of_torchao(isa, dtype, generator, width, num_out):
    weight = random(generator, num_out, width, dtype=dtype)
    operand = held(DYNAMIC[0], weight)
    theirs = Int8Tensor.from_hp(weight, PerRow(), act_quant_kwargs=QuantizeTensorToInt8Kwargs(PerRow()))
    for rows, bias in itertools.product(ROWS, [None, random(generator, num_out, dtype=dtype)]):
        x = awkward_rows(generator, rows, width, dtype)
        found = cpu.quantised_linear(strided(x), operand, bias, None, num_out)
        assert torch.equal(found, torch.nn.functional.linear(x, theirs, bias)), rows


@pytest.mark.parametrize(("form", "width", "num_out"), DYNAMIC_CASES, ids=ident)
def test_dynamic_agrees_with_exact_sums(isa, dtype, generator, form, width, num_out):
    weight = random(generator, num_out, width, dtype=dtype) / width**0.5
    operand = held(form, weight)
    for rows, bias in itertools.product(ROWS, [None, random(generator, num_out, dtype=dtype)]):
        x = awkward_rows(generator, rows, width, dtype)
        expected = reference.quantised_linear(x, operand, bias, None, num_out)
        found = cpu.quantised_linear(strided(x), operand, bias, None, num_out)
        assert found.dtype == dtype
        size = x.double().abs().amax(1, keepdim=True).clamp(min=1)
        rounded = expected.double().abs() + (0 if bias is None else bias.double().abs())
        error = (found.double() - expected.double()).abs()
        assert (error <= ROUNDING[dtype] * rounded + 1e-5 * size).all(), rows


@pytest.mark.parametrize(("kind", "row_per_output"), POPULARITIES)
@pytest.mark.parametrize("form", DYNAMIC[:2], ids=ident)
def test_dynamic_experts_have_the_bits_of_dense_layers(isa, dtype, generator, form, kind, row_per_output):
    experts, width, num_out = 6, 96, 37
    weight = random(generator, experts, num_out, width, dtype=dtype)
    operand = held(form, weight)
    for rows, bias in itertools.product(ROWS, [None, random(generator, experts, num_out, dtype=dtype)]):
        ids = popularity(generator, kind, rows * 2, experts).view(rows, 2)
        x = strided(random(generator, rows * (2 if row_per_output else 1), width, dtype=dtype))
        found = cpu.quantised_linear(x, operand, bias, ids, num_out)
        source = reference.input_rows(x, ids)
        for row, expert in enumerate(ids.flatten().tolist()):
            if expert < 0:
                assert (found[row] == 0).all()
                continue
            matrix = QuantisedOperand(form, operand.data[expert], operand.scale[expert])
            one_bias = None if bias is None else bias[expert]
            alone = cpu.quantised_linear(x[source[row]][None], matrix, one_bias, None, num_out)
            assert torch.equal(found[row], alone[0]), (rows, row)


@pytest.mark.parametrize("form", DYNAMIC[:2], ids=ident)
def test_nan_and_infinity_of_inputs_stay_visible(isa, dtype, generator, form):
    operand = held(form, random(generator, 20, 96, dtype=dtype))
    x = torch.ones(3, 96, dtype=dtype)
    x[0, 3], x[1, 95] = float("nan"), float("inf")
    found = cpu.quantised_linear(x, operand, None, None, 20)
    assert found[:2].isnan().all()
    assert found[2].isfinite().all()


def test_inputs_whose_sums_do_not_fit_are_refused():
    assert "don't fit 32 bits" in DYNAMIC[0].refusal(65_540)
    assert DYNAMIC[0].refusal(65_536) is None
