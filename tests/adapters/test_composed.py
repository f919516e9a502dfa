# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_lora.adapters.composed import compose
from moe_lora.adapters.contents import AdapterContents
from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.packed import PackedAdapter, entry_widths
from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.adapters.registry.base_model import model_shape
from moe_lora.core.composed import Part, name_of, parts_in, path_of
from moe_lora.core.errors import AdapterError

DEMO = Path(__file__).parents[2] / "demo"
SHAPE = model_shape(DEMO / "model")
WEIGHTS = {"upper": 0.75, "reverse-r16": -0.5, "rot13": 2.0}


def read(name: str, dtype: torch.dtype = torch.float32) -> PackedAdapter:
    return read_adapter(DEMO / "adapters" / name, SHAPE, dtype, name)


def delta(adapter: PackedAdapter, layer: int, entry: int) -> torch.Tensor:
    """s B A of an entry: [out_features, in_features], fp64."""
    packed = adapter.layers[layer]
    a_at, b_at, lora_rank = packed.table[entry].tolist()
    widths = [int(width[entry]) for width in entry_widths(SHAPE)]
    a, b = (
        packed.data[at : at + lora_rank * width].view(lora_rank, width).double()
        for at, width in zip((a_at, b_at), widths, strict=True)
    )
    return float(packed.scale[entry]) * b.t() @ a


def test_the_sum_adds_deltas_and_ranks():
    terms = [(read(name), weight) for name, weight in WEIGHTS.items()]
    made = compose("sum", terms, SHAPE)
    assert made.max_lora_rank == sum(adapter.max_lora_rank for adapter, _ in terms)
    assert set(made.targets) == {name for adapter, _ in terms for name in adapter.targets}
    for layer in range(SHAPE.num_layers):
        used = made.layers[layer].table[:, 2].nonzero().flatten().tolist()
        assert used
        for entry in used:
            expected = sum(weight * delta(adapter, layer, entry) for adapter, weight in terms)
            torch.testing.assert_close(delta(made, layer, entry), expected, rtol=1e-5, atol=1e-6)


def test_entries_with_common_matrices_share_them_in_the_sum():
    """The sum has the bytes of its terms, so no matrix is copied for each entry."""
    terms = [read("upper", torch.bfloat16), read("reverse-r16", torch.bfloat16)]
    made = compose("sum", [(one, 1.0) for one in terms], SHAPE)
    assert made.nbytes <= sum(one.nbytes for one in terms) + 64 * len(made.layers[0].table) * len(made.layers)


def test_equal_terms_are_one_content_and_each_change_another():
    upper, rot13 = read("upper"), read("rot13")
    made = [
        compose("sum", terms, SHAPE).content_hash
        for terms in (
            [(upper, 0.5), (rot13, 1.0)],
            [(upper, 0.5), (rot13, 1.0)],
            [(upper, 0.25), (rot13, 1.0)],
            [(upper, 0.5)],
        )
    ]
    assert made[0] == made[1]
    assert len(set(made)) == 3
    parts = [Part("a", "/x/a", "h1", 0.5), Part("b", "/x/b", "h2", -1.0)]
    assert parts_in(path_of(parts)) == parts
    moved = [replace(part, name="c", path="/y") for part in parts]
    assert name_of(moved) == name_of(parts), "contents and weights are the name"
    assert name_of([parts[0], replace(parts[1], weight=1.0)]) != name_of(parts)
    assert name_of([parts[0], replace(parts[1], content_hash="h3")]) != name_of(parts)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"has_columns": True}, "'upper' has use_dora or lora_bias"),
        ({"invocation": (1, 2)}, "'upper' has alora_invocation_tokens"),
        ({"layers": read("upper").layers * 2}, "'upper' changes lm_head or embed_tokens"),
    ],
)
def test_a_term_of_another_kind_is_refused_by_name(change, said):
    with pytest.raises(AdapterError, match=said):
        compose("sum", [(replace(read("upper"), **change), 1.0), (read("rot13"), 1.0)], SHAPE)


def test_values_beyond_the_dtype_are_refused():
    with pytest.raises(AdapterError, match="too large"):
        compose("sum", [(read("upper", torch.float16), 1e9)], SHAPE)


def test_a_sum_leaves_the_store_of_contents_as_it_was(tmp_path):
    """A term that was kept stays, for the restart of another instance; a term read for the sum goes."""
    store = HostStore(tmp_path)
    contents = AdapterContents(SHAPE, torch.float32, store)
    upper, rot13 = (read(name) for name in ("upper", "rot13"))
    store.put(upper)
    parts = [
        Part(one.name, str(DEMO / "adapters" / one.name), one.content_hash, 0.5) for one in (upper, rot13)
    ]
    made = contents.read(name_of(parts), path_of(parts))
    assert [one.content_hash in store for one in (upper, rot13, made)] == [True, False, True]


@pytest.mark.filterwarnings("ignore")
def test_a_refused_sum_leaves_none_of_its_parts_in_the_store(tmp_path):
    store, upper = HostStore(tmp_path), read("upper")
    contents = AdapterContents(SHAPE, torch.float32, store, max_lora_rank=upper.max_lora_rank)
    part = Part("upper", str(DEMO / "adapters/upper"), upper.content_hash, 0.5)
    gone = Part("gone", str(tmp_path / "gone"), "0" * 64, 0.5)
    for parts in ([part, part], [part, gone], [replace(part, weight=1e39)]):
        with pytest.raises(AdapterError):
            contents.read(name_of(parts), path_of(parts))
        assert upper.content_hash not in store
