# SPDX-License-Identifier: Apache-2.0
"""Quantisation schemes of checkpoints and the meaning of their tensors.

Legend: N output width, K input width, G groups of K.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_lora.core.errors import ConfigError
from moe_lora.families import family_of
from moe_lora.families.schema.config_json import text_config
from moe_lora.kernels.quantised import Format, QuantisedOperand, dequantise, format_of, put

READ = (
    "mxfp4 experts of a family that is published so; fp8 in blocks or static (E4M3); compressed-tensors "
    "pack-quantized with 4 or 8 bits and float-quantized; torchao's Int8Tensor, IntxUnpackedToInt8Tensor and "
    "Float8Tensor, weights only"
)


@dataclass(frozen=True)
class StoredWeight:
    """A matrix [N, K] in a file, as values and scales; copied on access only.

    values: rows -> their values, as `quantised.put` takes them.  scale: [N / row_group, G].  zero: int8 [N,
    G].
    """

    form: Format
    shape: tuple[int, int]
    values: Callable[[slice], torch.Tensor]
    scale: torch.Tensor
    zero: torch.Tensor | None = None

    def scales(self, row_group: int) -> torch.Tensor:
        """[N / row_group, G]; row_group divides the format's."""
        repeats = self.form.row_group // row_group
        if repeats == 1:
            return self.scale
        return self.scale.repeat_interleave(repeats, 0)[: -(-self.shape[0] // row_group)]

    def dequantised(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """Dequantised weights of some rows: [R, K]."""
        q = self.values(rows)
        form = replace(self.form, row_group=1)
        scale = self.scales(1)[rows].to(torch.uint8 if form.name == "mxfp4" else torch.float32)
        data = torch.empty(form.sizes(*q.shape)[0], dtype=form.dtypes(dtype)[0])
        held = torch.empty(form.sizes(*q.shape)[1], dtype=scale.dtype)
        put(form, q, scale, data, held, 0)
        zero = None if self.zero is None else self.zero[rows]
        return dequantise(QuantisedOperand(form, data, held, zero), q.shape[0], q.shape[1], dtype)

    def part(self, rows: slice, columns: slice) -> StoredWeight:
        """Some rows and inputs.  Raises ValueError for a cut inside a group of inputs."""
        num_out, width = self.shape
        if (rows, columns) == (slice(0, num_out), slice(0, width)):
            return self
        size, groups = self.form.group_size, slice(None)
        if size:
            if columns.start % size or (columns.stop % size and columns.stop != width):
                raise ValueError(f"inputs {columns.start} to {columns.stop} cut a group of {size}")
            groups = slice(columns.start // size, -(-columns.stop // size))
        row_group = math.gcd(self.form.row_group, rows.start)
        scale = self.scales(row_group)[rows.start // row_group : -(-rows.stop // row_group), groups]

        def values(some: slice) -> torch.Tensor:
            return self.values(slice(rows.start + some.start, rows.start + some.stop))[:, columns]

        return StoredWeight(
            format_of(self.form.name, size, row_group),
            (rows.stop - rows.start, columns.stop - columns.start),
            values,
            scale,
            None if self.zero is None else self.zero[rows, groups],
        )

    def check(self) -> None:
        """Raise ValueError for inconsistent values and scales, or damaged scales."""
        groups, (num_out, width) = self.form.num_groups(self.shape[1]), self.shape
        refusal = self.form.refusal(width)
        if refusal is not None:
            raise ValueError(refusal)
        wanted = (-(-num_out // self.form.row_group), groups)
        for name, tensor, size in (
            ("scale", self.scale, wanted),
            ("zero point", self.zero, (num_out, groups)),
        ):
            if tensor is not None and tuple(tensor.shape) != size:
                raise ValueError(
                    f"its {name}s are {list(tensor.shape)} where {list(size)} belong to {self.shape}"
                )
        if self.form.name == "mxfp4":
            if bool((self.scale == 255).any()):
                raise ValueError("a scale is not a number (E8M0 255)")
        elif not self.scale.is_floating_point():
            raise ValueError(f"its scales are {self.scale.dtype}, which have no known meaning, not floats")
        elif not bool((self.scale.float().isfinite() & (self.scale.float() >= 0)).all()):
            raise ValueError("a scale is negative or not finite")


Reader = tuple[tuple[str, ...], Callable[..., StoredWeight]]
"""Names of tensors, and their interpretation."""


@dataclass(frozen=True)
class Scheme:
    """A quantisation scheme of checkpoints.  read: a weight's name -> tensors and their meaning."""

    name: str
    present: Callable[[str, Container[str]], bool]
    read: Callable[[str, Container[str]], Reader]


def scheme_of(config: Mapping[str, Any], metadata: Callable[[], Mapping[str, str]]) -> Scheme | None:
    """The scheme in config.json's quantization_config.

    None: unquantised, or in the family's own format.  Raises ConfigError for unsupported schemes.
    """
    section = text_config(config).get("quantization_config") or {}
    method = section.get("quant_method")
    if not section or (method is not None and method == family_of(config).own_format):
        return None
    match method:
        case "fp8":
            return _fp8(section)
        case "compressed-tensors":
            return _compressed_tensors(section)
        case "torchao":
            return _torchao(metadata())
    raise _refusal(f"quant_method={method!r}")


def _are_sizes(values: Any, count: int) -> bool:
    return isinstance(values, list) and len(values) == count and all(type(n) is int and n > 0 for n in values)


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        f"config.json has quantization_config with {what}, which is not supported here; what is read: "
        f"{READ}. Or save the checkpoint in bfloat16 or float32 and give quantize=..."
    )


def _fp8(section: Mapping[str, Any]) -> Scheme:
    """fp8 in blocks (DeepSeek, Qwen3) or a tensor (Ministral 3): X.weight and X.weight_scale_inv, a factor.

    Inputs stay in the model's dtype: a static activation_scale has no effect.
    """
    block: Any = section.get("weight_block_size")
    is_e8m0 = section.get("scale_fmt") == "ue8m0"

    def of_tensor(name: str, tensors: Container[str]) -> Reader:
        return (name, f"{name}_scale_inv"), functools.partial(_of_floats, None, is_e8m0=is_e8m0)

    def present(name: str, tensors: Container[str]) -> bool:
        return f"{name}_scale_inv" in tensors

    if block is None and section.get("activation_scheme") == "static":
        return Scheme("fp8", present, of_tensor)
    if section.get("activation_scheme", "dynamic") != "dynamic":
        raise _refusal(f"quant_method='fp8' and activation_scheme={section['activation_scheme']!r}")
    if section.get("fmt", "e4m3") != "e4m3" or not _are_sizes(block, 2):
        raise _refusal(f"quant_method='fp8', fmt={section.get('fmt')!r} and weight_block_size={block!r}")
    make = functools.partial(_of_floats, format_of("fp8", block[1], block[0]), is_e8m0=is_e8m0)
    return Scheme("fp8", present, lambda name, tensors: ((name, f"{name}_scale_inv"), make))


def _compressed_tensors(section: Mapping[str, Any]) -> Scheme:
    """pack-quantized: X.weight_packed, weight_scale, weight_shape, weight_zero_point.

    float-quantized: X.weight, weight_scale.
    """
    groups = section.get("config_groups") or {}
    _refuse_transforms((section.get("transform_config") or {}).get("config_groups") or {})
    kinds = {
        _compressed_group(group.get("format") or section.get("format"), group, name)
        for name, group in groups.items()
    }
    if len(kinds) != 1:
        raise _refusal(f"quant_method='compressed-tensors' and {len(kinds)} kinds of weights")
    floats, bits, group_size, row_group = kinds.pop()
    if floats:
        form = None if row_group is None else format_of("fp8", group_size, row_group)

        def read_floats(name: str, tensors: Container[str]) -> Reader:
            return (name, f"{name}_scale"), functools.partial(_of_floats, form)

        return Scheme("compressed-tensors", lambda name, tensors: f"{name}_scale" in tensors, read_floats)

    asymmetric = all(group["weights"].get("symmetric") is False for group in groups.values())

    def read(name: str, tensors: Container[str]) -> Reader:
        keys = [f"{name}_packed", f"{name}_scale", f"{name}_shape"]
        if asymmetric or f"{name}_zero_point" in tensors:
            keys.append(f"{name}_zero_point")
        return tuple(keys), functools.partial(_unpacked, bits, group_size)

    return Scheme("compressed-tensors", lambda name, tensors: f"{name}_packed" in tensors, read)


def _refuse_transforms(groups: Mapping[str, Any]) -> None:
    """Transforms of weights are in the weights; others change activations of each step."""
    for name, transform in groups.items():
        for one in transform.get("apply") or ():
            if one.get("location") not in ("weight_input", "weight_output"):
                what = f"a transform of location={one.get('location')!r} ({name})"
                raise _refusal(f"quant_method='compressed-tensors' and {what}")


def _compressed_group(
    kind: str | None, group: Mapping[str, Any], name: str
) -> tuple[bool, int, int, int | None]:
    """True for floats; bits; inputs that share a scale (0: all); outputs that share a scale (None: all)."""
    weights = group.get("weights") or {}
    if kind not in ("pack-quantized", "float-quantized"):
        raise _refusal(f"quant_method='compressed-tensors' and format={kind!r} ({name})")
    for what in ("input_activations", "output_activations"):
        if group.get(what):
            raise _refusal(f"quant_method='compressed-tensors' and {what} ({name})")
    floats = kind == "float-quantized"
    bits, kept = weights.get("num_bits"), weights.get("type", "int")
    strategy, order = weights.get("strategy"), weights.get("actorder")
    if (
        bits not in ((8,) if floats else (4, 8))
        or kept != ("float" if floats else "int")
        or strategy not in (("tensor", "channel", "block") if floats else ("channel", "group"))
        or order not in (None, "weight", "static")
    ):
        raise _refusal(
            f"quant_method='compressed-tensors', num_bits={bits}, type={kept!r}, strategy={strategy!r}, "
            f"actorder={order!r} ({name})"
        )
    assert isinstance(bits, int)
    block: Any = weights.get("block_structure")
    group_size: Any = weights.get("group_size")
    if (strategy == "block" and not _are_sizes(block, 2)) or (
        strategy == "group" and not _are_sizes([group_size], 1)
    ):
        raise _refusal(
            f"quant_method='compressed-tensors', strategy={strategy!r}, block_structure={block!r} and "
            f"group_size={group_size!r} ({name})"
        )
    if strategy == "block":
        return floats, bits, block[1], block[0]
    return floats, bits, group_size if strategy == "group" else 0, None if strategy == "tensor" else 1


def _of_floats(
    form: Format | None, weight: torch.Tensor, scale: torch.Tensor, is_e8m0: bool = False
) -> StoredWeight:
    """is_e8m0: scales of bytes are exponents, 127 for 1 (OCP Microscaling Formats v1.0)."""
    if weight.dtype != torch.float8_e4m3fn:
        raise ValueError(f"it is {weight.dtype}, not float8_e4m3fn")
    if is_e8m0 and scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    shape = _matrix(weight)
    if form is None:
        if scale.numel() != 1:
            raise ValueError(f"its scales are {list(scale.shape)} where one belongs to the whole tensor")
        form, scale = format_of("fp8"), scale.reshape(1, 1).expand(shape[0], 1)
    scale = scale.float() if scale.is_floating_point() else scale
    return StoredWeight(form, shape, lambda rows: weight[rows], scale)


def _unpacked(
    bits: int,
    group_size: int,
    packed: torch.Tensor,
    scale: torch.Tensor,
    shape: torch.Tensor,
    zero: torch.Tensor | None = None,
) -> StoredWeight:
    """packed: int32 [N, K * bits / 32], first value lowest, each + 2**(bits - 1).

    zero: packed along N, or int8 [N, G] (until April 2025).
    """
    num_out, width = (int(n) for n in shape)
    if packed.dtype != torch.int32 or tuple(packed.shape) != (num_out, -(-width * bits // 32)):
        raise ValueError(
            f"it is {packed.dtype} {list(packed.shape)}, not int32 for {bits} bits of {num_out, width}"
        )
    form = _integers(bits, group_size, width)
    if zero is not None and zero.dtype != torch.int8:
        if zero.dtype != torch.int32 or zero.dim() != 2 or zero.shape[0] != -(-num_out * bits // 32):
            raise ValueError(f"its zero points are {zero.dtype} {list(zero.shape)} for {num_out} outputs")
        zero = _fields(zero.T, bits).T[:num_out].contiguous()
    return StoredWeight(
        form, (num_out, width), lambda rows: _fields(packed[rows], bits)[:, :width], scale, zero
    )


def _fields(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """[R, words] int32 as int8 [R, words * 32 / bits]."""
    codes = packed.contiguous().view(torch.uint8)
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    return (codes - (1 << bits - 1)).view(torch.int8)


def _integers(bits: int, group_size: int, width: int) -> Format:
    """The format of integers; at 4 bits a whole output is a group."""
    if bits <= 4:
        return format_of("int4", group_size or width)
    return format_of("int8", group_size if group_size != width else 0)


def _torchao(metadata: Mapping[str, str]) -> Scheme:
    """torchao's X._weight_qdata, _scale, _zero_point; the kind is in the metadata."""
    try:
        kinds = {name: json.loads(metadata[name]) for name in json.loads(metadata["tensor_names"])}
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(
            "config.json says torchao, but the files' metadata don't say which tensors it wrote; save the "
            "checkpoint as safetensors"
        ) from error
    for name, kind in kinds.items():
        _refuse_torchao(name, kind)
    quantised = {name for name, kind in kinds.items() if kind["_type"] != "Tensor"}

    def read(name: str, tensors: Container[str]) -> Reader:
        module, _, attribute = name.rpartition(".")
        keys = [f"{module}._{attribute}_{part}" for part in ("qdata", "scale", "zero_point")]
        return tuple(keys[: 2 + (keys[2] in tensors)]), functools.partial(_of_torchao, kinds[name])

    return Scheme("torchao", lambda name, tensors: name in quantised, read)


def _refuse_torchao(name: str, kind: Mapping[str, Any]) -> None:
    data, type_ = kind.get("_data") or {}, kind.get("_type")
    if type_ not in ("Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor"):
        raise _refusal(f"quant_method='torchao' and {type_} ({name})")
    if data.get("act_quant_kwargs") or data.get("activation_quantization"):
        raise _refusal(f"quant_method='torchao' and a {type_} with quantised activations ({name})")


def _of_torchao(
    kind: Mapping[str, Any], q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None
) -> StoredWeight:
    """One matrix of torchao; its block gives a scale's group."""
    num_out, width = _matrix(q)
    data = kind["_data"]
    *others, block_rows, group = data.get("block_size") or (num_out, width)
    if any(size != 1 for size in others):
        raise ValueError(f"its scales are shared by experts (block_size={data['block_size']})")
    if kind["_type"] == "Float8Tensor":
        if q.dtype != torch.float8_e4m3fn:
            raise ValueError(f"it is {q.dtype}, not float8_e4m3fn")
        form = format_of("fp8", 0 if group == width else group, block_rows)
        return StoredWeight(form, (num_out, width), lambda rows: q[rows], scale.reshape(-1, width // group))
    bits = 8 if kind["_type"] == "Int8Tensor" else int(data["target_dtype"]["_data"].removeprefix("int"))
    form, groups = _integers(bits, group, width), width // group
    scale = scale.reshape(-1, groups).expand(num_out, groups)
    if zero is not None:
        zero = zero.reshape(-1, groups).expand(num_out, groups)
        if zero.is_floating_point() and bool(((zero != zero.round()) | (zero.abs() > 127)).any()):
            raise ValueError("its zero points are no integers of 8 bits")
        zero = zero.to(torch.int8).contiguous() if bool(zero.any()) else None
    return StoredWeight(form, (num_out, width), lambda rows: q[rows], scale.contiguous(), zero)


def _matrix(weight: torch.Tensor) -> tuple[int, int]:
    if weight.dim() != 2:
        raise ValueError(f"it has shape {list(weight.shape)}, not two dims")
    return weight.shape[0], weight.shape[1]


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> StoredWeight:
    """MXFP4 (OCP Microscaling Formats v1.0): FP4 E2M1 values, an E8M0 scale per 32 values.

    blocks: [N, G, 16] uint8, two values per byte, low nibble first.  scales: [N, G] uint8.
    """
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or blocks.shape != (*scales.shape, 16):
        raise ValueError(
            f"blocks and scales are {blocks.dtype} {list(blocks.shape)} and {scales.dtype} "
            f"{list(scales.shape)}, not uint8 with 16 bytes beside each scale"
        )

    def codes(rows: slice) -> torch.Tensor:
        return torch.stack([blocks[rows] & 15, blocks[rows] >> 4], dim=-1).flatten(1)

    num_out, groups = scales.shape
    return StoredWeight(format_of("mxfp4", 32), (num_out, groups * 32), codes, scales)
