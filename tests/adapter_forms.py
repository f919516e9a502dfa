# SPDX-License-Identifier: Apache-2.0
"""Adapter files of each form for each family, and the table of docs/reference/adapter_forms.md.

`python -m tests.adapter_forms` writes the page: the reader runs on a fixture of each cell.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from moe_lora import families
from moe_lora.adapters.contents import AdapterContents
from moe_lora.adapters.peft.files import CONFIG_FILE, WEIGHTS_FILE
from moe_lora.core.errors import AdapterError
from moe_lora.core.wrong_files import read_config
from tests.adapters.peft.mlx_files import as_mlx
from tests.adapters.peft.test_columns import column_adapter
from tests.adapters.peft.test_outer_sites import EMBEDDINGS, outer_adapter
from tests.adapters.peft.test_stacked import STYLES, per_expert, rewritten, stacked
from tests.families import ALL_FAMILIES, DENSE_FAMILIES, PER_EXPERT_FAMILIES, make_adapter, make_checkpoint

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "adapter_forms.md"
TEST = "tests/engine/test_adapter_forms.py::test_each_served_form_continues_as_peft_does"
Folders = tuple[Path, Path]
"""The adapter's folder, and a folder of the same adapter that peft loads."""


@dataclass(frozen=True)
class Form:
    """title: in the table.  make: (family, base, folder) -> the adapter.  families: with a fixture."""

    title: str
    make: Callable[[str, Path, Path], Folders]
    families: tuple[str, ...] = ALL_FAMILIES


def of_peft(**config: Any) -> Callable[[str, Path, Path], Folders]:
    """As PEFT writes it, with these fields of LoraConfig."""

    def make(family: str, base: Path, folder: Path) -> Folders:
        path = make_adapter(family, base, folder, 3, scale=0.5, **config)
        return path, path

    return make


def outer(*modules: str, **config: Any) -> Callable[[str, Path, Path], Folders]:
    """On attention and these modules."""

    def make(family: str, base: Path, folder: Path) -> Folders:
        path = outer_adapter(family, base, folder, *modules, lora_rank=3, scale=0.5, **config)
        return path, path

    return make


def columns(**config: Any) -> Callable[[str, Path, Path], Folders]:
    """On attention, with scaled or shifted columns."""

    def make(family: str, base: Path, folder: Path) -> Folders:
        path = column_adapter(family, base, folder, lora_rank=3, **config)
        return path, path

    return make


def saved_embedding(family: str, base: Path, folder: Path) -> Folders:
    return outer(modules_to_save=[EMBEDDINGS.get(family, "embed_tokens")])(family, base, folder)


def single_experts(family: str, base: Path, folder: Path) -> Folders:
    path = per_expert(family, base, folder / "plain", scale=0.5)
    return path, path


def of_all_experts(style: str, *, mixed: bool) -> Callable[[str, Path, Path], Folders]:
    def make(family: str, base: Path, folder: Path) -> Folders:
        plain, _ = single_experts(family, base, folder)
        tensors = stacked(load_file(plain / WEIGHTS_FILE), style, shared=True, mixed=mixed)
        targets = [*(f"{one}_proj" for one in "qkvo"), *(f"experts.{one}" for one in STYLES["w"])]
        config = {} if mixed else {"target_modules": targets}
        return rewritten(plain, folder / "stacked", tensors, **config), plain

    return make


def of_mlx(**config: Any) -> Callable[[str, Path, Path], Folders]:
    """config: of LoraConfig."""

    def make(family: str, base: Path, folder: Path) -> Folders:
        if family in PER_EXPERT_FAMILIES:
            plain, _ = single_experts(family, base, folder)
            tensors = stacked(load_file(plain / WEIGHTS_FILE), "proj", shared=False)
            return as_mlx(plain, folder / "mlx", family, tensors), plain
        make = columns if config else of_peft
        plain, _ = make(**config)(family, base, folder / "plain")
        return as_mlx(plain, folder / "mlx", family), plain

    return make


def of_unsloth(layout: str | None) -> Callable[[str, Path, Path], Folders]:
    def make(family: str, base: Path, folder: Path) -> Folders:
        plain = make_adapter(family, base, folder / "plain", 3, scale=0.5)
        tensors = load_file(plain / WEIGHTS_FILE)
        if layout == "grouped_by_expert":
            num_experts = families.shape_of(read_config(base)).num_experts
            for key, b in tensors.items():
                if ".experts." in key and "lora_B" in key:
                    tensors[key] = b.view(len(b), -1, num_experts).transpose(1, 2).reshape(b.shape)
        mark = {"lora_B_layout": layout} if layout else {"auto_mapping": {"unsloth_fixed": True}}
        return rewritten(plain, folder / "unsloth", tensors, **mark), plain

    return make


def field(**fields: Any) -> Callable[[str, Path, Path], Folders]:
    """PEFT's file with fields that no pair of tensors shows."""

    def make(family: str, base: Path, folder: Path) -> Folders:
        plain = base.with_name(f"{base.name}-plain")
        if not plain.exists():
            of_peft()(family, base, plain)
        path = shutil.copytree(plain, folder)
        config = json.loads((path / CONFIG_FILE).read_text()) | fields
        (path / CONFIG_FILE).write_text(json.dumps(config))
        return path, path

    return make


_MOE = tuple(family for family in ALL_FAMILIES if family not in DENSE_FAMILIES)
_UNMERGED = tuple(family for family in ALL_FAMILIES if family != "dbrx")
"""Families with peft's unmerged forward pass as the oracle."""
_FUSED = tuple(family for family in _MOE if family != "dbrx")
FORMS = {
    "peft": Form("PEFT's own (linear layers, `target_parameters`)", of_peft()),
    "patterns": Form("rsLoRA", of_peft(use_rslora=True)),
    "per_expert": Form("a module per expert", single_experts, PER_EXPERT_FAMILIES),
    "unsloth": Form("Unsloth, `rank_major`", of_unsloth("rank_major"), _FUSED),
    "unsloth_grouped": Form("Unsloth, `grouped_by_expert`", of_unsloth("grouped_by_expert"), _FUSED),
    "unsloth_unmarked": Form("Unsloth before 2026.9.6, no layout", of_unsloth(None), _FUSED),
    "tinker": Form("Tinker, raw", of_all_experts("w", mixed=False), PER_EXPERT_FAMILIES),
    "bridge": Form("Megatron-Bridge, shared outer", of_all_experts("", mixed=True), PER_EXPERT_FAMILIES),
    "mlx": Form("mlx-lm", of_mlx(), (*DENSE_FAMILIES, *PER_EXPERT_FAMILIES)),
    "mlx_dora": Form("mlx-lm, DoRA", of_mlx(use_dora=True), DENSE_FAMILIES),
    "head": Form("LoRA on `lm_head`", outer("lm_head")),
    "embedding": Form("LoRA on `embed_tokens`", outer("embed_tokens")),
    "mica": Form("MiCA", outer(init_lora_weights="mica")),
    "dora": Form("DoRA, on attention", columns(use_dora=True)),
    "dora_experts": Form("DoRA, on experts", field(use_dora=True), _MOE),
    "alora": Form(
        "activated LoRA, on attention", outer(alora_invocation_tokens=[83], task_type="CAUSAL_LM"), _UNMERGED
    ),
    "alora_experts": Form("activated LoRA, on experts", field(alora_invocation_tokens=[5]), _MOE),
    "lora_bias": Form("`lora_bias`, on attention", columns(lora_bias=True), _UNMERGED),
    "lora_bias_experts": Form("`lora_bias`, on experts", field(lora_bias=True), _MOE),
    "bias": Form("trained biases", field(bias="lora_only")),
    "head_saved": Form("`modules_to_save`: head", outer(modules_to_save=["lm_head"])),
    "embedding_saved": Form("`modules_to_save`: embedding", saved_embedding),
    "tokens": Form("`trainable_token_indices`", outer(trainable_token_indices=[5, 83, 71])),
    **{
        name.lower(): Form(f"{name}, not converted", field(init_lora_weights=value))
        for name, value in (
            ("PiSSA", "pissa"),
            ("OLoRA", "olora"),
            ("CorDA", "corda"),
            ("LoftQ", "loftq"),
            ("LoRA-GA", "lora_ga"),
        )
    },
    "qalora": Form("QALoRA", field(use_qalora=True)),
    "loha": Form("other methods, such as LoHa", field(peft_type="LOHA")),
}


def problem(path: Path, base: Path) -> str | None:
    """The reader's refusal without places of files; None: the adapter is served."""
    shape = families.shape_of(read_config(base))
    try:
        AdapterContents(shape, torch.float32, base_dir=base).read("a", str(path))
    except AdapterError as error:
        return str(error).removeprefix("adapter 'a': ").replace(str(path), "…")
    return None


def page() -> str:
    """The page of all forms and families."""
    titles = {family: families.family_named(family).title for family in ALL_FAMILIES}
    rows, messages = [], {}
    with tempfile.TemporaryDirectory(prefix="forms") as root:
        bases = {family: make_checkpoint(family, Path(root, family)) for family in ALL_FAMILIES}
        for name, form in FORMS.items():
            cells = []
            for family in ALL_FAMILIES:
                if family not in form.families:
                    cells.append("–")
                    continue
                path, _ = form.make(family, bases[family], Path(root, f"{family}-{name}"))
                said = problem(path, bases[family])
                number = said and messages.setdefault(said, len(messages) + 1)
                cells.append(f"refused ({number})" if said else "served")
            rows.append(f"| {form.title} | {' | '.join(cells)} |")
    return "\n".join(
        [
            "# Adapter forms",
            "Written by `python -m tests.adapter_forms`: the reader runs on a file of each cell.",
            "",
            f"- **served**: `{TEST}` holds the tokens, greedy in fp32, against transformers and peft.",
            "- **refused**: the message has the number, below.",
            "- **–**: no file of the form for the family.",
            "",
            f"| form | {' | '.join(titles.values())} |",
            f"| --- |{' --- |' * len(titles)}",
            *rows,
            "",
            *(f"{number}. `{said}`" for said, number in messages.items()),
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page())
