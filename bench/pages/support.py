# SPDX-License-Identifier: Apache-2.0
"""The support matrix of docs/reference/support.md: the data, and the tables made of the data.

A cell is "tested" (by the default run, so by CI), "tested, slow" (by `make test-slow`), "refused" (by a
tested error), "ran once" (by a record of bench/results) or "never ran".  A cell without evidence below never
ran.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from moe_lora import families
from moe_lora.families import family_named

from .evidence import Config, records
from .markdown import table

FAMILIES = {name: family_named(name).title for name in families.FAMILIES}
MOE = tuple(name for name in FAMILIES if "num_experts" in family_named(name).sizes)
DENSE = tuple(name for name in FAMILIES if name not in MOE)
COVERING = ("mixtral", "qwen3_moe", "gpt_oss", "dbrx", "glm4_moe", "qwen2_moe", "afmoe", "llama")
"""Families that cover all pieces of the layers: those of the tests of each feature."""
DEVICES = ("CPU", "one GPU", "several GPUs")
FEATURES = (
    "base model",
    "mixed adapters",
    "TP",
    "EP",
    "LoRA Server",
    "host workers",
    "quantised",
    "merged",
    "migration",
    "pool",
)


@dataclass(frozen=True, kw_only=True)
class InCi:
    """A test of the default run.

    named: the ids of the cases carry the family; else the model of the test is of the family.
    refused: the test holds the error for the combination.  slow: a test of `make test-slow`.
    """

    device: str
    feature: str
    families: tuple[str, ...]
    test: str
    named: bool = True
    refused: bool = False
    slow: bool = False


@dataclass(frozen=True, kw_only=True)
class RanOnce:
    """Records of the combination: of the part `part` and, where given, of the model `model`."""

    device: str
    feature: str
    families: tuple[str, ...]
    file: str
    part: str
    what: str
    model: str | None = None

    def keeps(self, config: Config, result: Config) -> bool:
        return config.get("part") == self.part and self.model in (None, result.get("model"))


def _later(feature: str, test: str, *quick: str, families: tuple[str, ...]) -> tuple[InCi, InCi]:
    """Evidence for families whose runs are slow, those of `quick` excepted."""
    rest = tuple(name for name in families if name not in quick)
    made = partial(InCi, device="CPU", feature=feature, test=test)
    return made(families=quick), made(families=rest, slow=True)


RECURRENT = ("qwen3_next", "qwen3_5_moe", "qwen3_5")
SIZED = ("gemma4",)
NEWER_SHARED = ("dots1", "granitemoeshared")
NEWER_ALONE = (
    *("ministral3", "seed_oss", "smollm3", "ernie4_5", "glm4", "olmo2", "olmo3", "exaone4", "gemma3"),
    *("qwen3_vl_moe", "flex_olmo"),
)
NEWER = (*NEWER_ALONE, "ernie4_5_moe", *NEWER_SHARED)
OTHERWISE_MOVED = ("mixtral", "deepseek_v2")
NEWER_MOE = tuple(name for name in NEWER if name in MOE)
LATENT = ("deepseek_v3", "deepseek_v2", "glm4_moe_lite")
FURTHER_MOE = ("olmoe", "granitemoe", "phimoe", "minimax_m2")
FURTHER = ("qwen3", "mistral", "qwen2", "granite", "phi3", *FURTHER_MOE)
EVIDENCE: tuple[InCi | RanOnce, ...] = (
    InCi(
        device="CPU",
        feature="base model",
        families=tuple(FAMILIES),
        test="tests/engine/test_oracle.py::test_mixed_batch_continues_as_peft_does",
    ),
    RanOnce(
        device="one GPU",
        feature="base model",
        families=("mixtral",),
        file="gpu.jsonl",
        part="mixtral",
        model="Mixtral-8x7B",
        what="2 layers of Mixtral-8x7B, random weights, on an H200",
    ),
    RanOnce(
        device="one GPU",
        feature="base model",
        families=("qwen3_moe",),
        file="gpu.jsonl",
        part="qwen3",
        model="Qwen3-30B-A3B",
        what="all layers of Qwen3-30B-A3B, random weights, on an H200",
    ),
    RanOnce(
        device="one GPU",
        feature="base model",
        families=("gpt_oss",),
        file="gpu.jsonl",
        part="gpt_oss",
        model="GPT-OSS-20B",
        what="all layers of GPT-OSS-20B, random weights in bf16, on an H200",
    ),
    InCi(
        device="CPU",
        feature="mixed adapters",
        families=tuple(FAMILIES),
        test="tests/engine/test_oracle.py::test_mixed_batch_continues_as_peft_does",
    ),
    InCi(
        device="CPU",
        feature="TP",
        families=COVERING,
        test="tests/engine/ranks/test_tensor_parallel.py::test_tokens_are_those_of_transformers_and_peft",
    ),
    InCi(
        device="CPU",
        feature="EP",
        families=COVERING[:-1],
        test="tests/engine/ranks/test_expert_parallel.py::test_tokens_are_those_of_one_process",
    ),
    InCi(
        device="CPU",
        feature="EP",
        families=DENSE,
        test="tests/engine/ranks/test_expert_parallel.py::test_dense_model_has_no_experts_to_share",
        refused=True,
    ),
    InCi(
        device="CPU",
        feature="LoRA Server",
        families=COVERING,
        test="tests/dist/test_same_tokens.py::test_bits_and_tokens_are_those_of_the_local_backend",
    ),
    InCi(
        device="CPU",
        feature="host workers",
        families=COVERING,
        test="tests/engine/test_host_assisted.py::test_killed_workers_change_no_token_and_come_back",
    ),
    InCi(
        device="CPU",
        feature="quantised",
        families=COVERING[:-1],
        test="tests/engine/test_quantised.py::test_mixed_batch_continues_as_peft_does",
    ),
    InCi(
        device="CPU",
        feature="quantised",
        families=("llama",),
        test="tests/engine/test_quantised.py::test_checkpoint_that_comes_quantised_is_served_as_it_is",
    ),
    InCi(
        device="CPU",
        feature="merged",
        families=("mixtral", "gpt_oss", "llama"),
        test="tests/engine/merging/test_merging.py::test_tokens_are_those_of_peft_in_every_mode",
    ),
    InCi(
        device="CPU",
        feature="merged",
        families=("qwen3_moe", "dbrx", "ernie4_5_moe", "glm4_moe", "qwen2_moe", "afmoe", *NEWER_SHARED),
        test="tests/models/test_weight_merge.py::test_mixed_steps_give_the_tokens_of_peft",
    ),
    InCi(
        device="CPU",
        feature="migration",
        families=("mixtral",),
        test="tests/dist/cluster/test_migration.py::test_moved_answer_has_the_tokens_of_one_left_alone",
        named=False,
    ),
    InCi(
        device="CPU",
        feature="migration",
        families=tuple(name for name in FAMILIES if name not in OTHERWISE_MOVED),
        test="tests/dist/cluster/test_migration.py::test_moved_answers_of_each_family_are_those_of_peft",
        slow=True,
    ),
    InCi(
        device="CPU",
        feature="pool",
        families=("mixtral",),
        test="tests/serve/test_pool_instances.py::test_answers_are_the_same_and_each_adapter_is_held_once",
        named=False,
    ),
    RanOnce(
        device="one GPU",
        feature="mixed adapters",
        families=("mixtral",),
        file="gpu.jsonl",
        part="engine",
        what="steps of a random model of 440 M weights, 8 layers, on an H200",
    ),
    RanOnce(
        device="one GPU",
        feature="mixed adapters",
        families=("qwen3_moe",),
        file="gpu.jsonl",
        part="zipf_adapters",
        model="Qwen3-30B-A3B",
        what="2 and 12 layers of Qwen3-30B-A3B, 64 adapters, on an H200",
    ),
    RanOnce(
        device="one GPU",
        feature="host workers",
        families=("mixtral",),
        file="gpu.jsonl",
        part="host",
        what="tokens of cold requests of a tiny model, on an H200",
    ),
    *_later(
        "TP",
        "tests/engine/ranks/test_tensor_parallel.py::test_tokens_are_those_of_transformers_and_peft",
        *("qwen2", "olmoe", "granite", "phi3"),
        families=FURTHER + NEWER,
    ),
    *_later(
        "EP",
        "tests/engine/ranks/test_expert_parallel.py::test_tokens_are_those_of_one_process",
        *("granitemoe", "phimoe"),
        families=(*FURTHER_MOE, *NEWER_MOE, RECURRENT[0], LATENT[0], LATENT[2]),
    ),
    *_later(
        "LoRA Server",
        "tests/dist/test_same_tokens.py::test_a_server_changes_no_token_of_the_later_families",
        *("phi3", *SIZED),
        families=(*FURTHER, *RECURRENT, *SIZED, *NEWER),
    ),
    *_later(
        "host workers",
        "tests/engine/test_host_assisted.py::test_cold_requests_answer_as_peft_does",
        *("olmoe", *SIZED),
        families=(*FURTHER, *SIZED, *NEWER),
    ),
    *_later(
        "quantised",
        "tests/engine/test_quantised.py::test_mixed_batch_continues_as_peft_does",
        *("qwen3", "phimoe", *SIZED),
        families=(*FURTHER, *SIZED, *NEWER, *RECURRENT, *LATENT),
    ),
    InCi(
        device="CPU",
        feature="merged",
        families=("qwen3", "granite", *SIZED),
        test="tests/models/test_weight_merge.py::test_mixed_steps_give_the_tokens_of_peft",
    ),
    InCi(
        device="CPU",
        feature="merged",
        families=tuple(
            sorted({*FURTHER, *NEWER_ALONE, *RECURRENT[1:], *LATENT[:2]} - {"qwen3", "granite", "gemma3"})
        ),
        test="tests/engine/merging/test_merging.py::test_tokens_are_those_of_peft_in_every_mode",
        slow=True,
    ),
    InCi(
        device="CPU",
        feature="merged",
        families=("gemma3",),
        test="tests/models/test_weight_merge.py::test_mixed_steps_give_the_tokens_of_peft",
        slow=True,
    ),
    *(
        InCi(
            device=device,
            feature=feature,
            families=RECURRENT,
            test=f"tests/engine/test_recurrent.py::{test}",
            refused=True,
        )
        for device, test, features in (
            ("CPU", "test_parts_without_recurrent_layers_are_refused_at_the_start", ("TP", "host workers")),
            ("one GPU", "test_a_device_without_a_kernel_is_refused", ("base model", "mixed adapters")),
        )
        for feature in features
    ),
    InCi(
        device="CPU",
        feature="EP",
        families=RECURRENT[1:2],
        test="tests/engine/test_recurrent.py::test_two_ranks_with_half_of_the_experts_each_answer_as_peft_does",
        named=False,
    ),
    *(
        InCi(
            device=device,
            feature=feature,
            families=LATENT,
            test=f"tests/engine/test_latent.py::{test}",
            refused=True,
            named=False,
        )
        for device, test, features in (
            ("CPU", "test_parts_without_latent_attention_are_refused_at_the_start", ("TP", "host workers")),
            ("CPU", "test_a_lora_server_is_refused", ("LoRA Server",)),
            ("one GPU", "test_a_device_without_a_kernel_is_refused", ("base model", "mixed adapters")),
        )
        for feature in features
    ),
    *(
        InCi(
            device="CPU",
            feature=feature,
            families=(family,),
            test=f"tests/engine/test_latent.py::{test}",
            named=False,
        )
        for feature, family, test in (
            ("EP", LATENT[1], "test_two_ranks_with_half_of_the_experts_each_answer_as_peft_does"),
            ("merged", LATENT[2], "test_merged_weights_answer_as_peft_does"),
        )
    ),
    *(
        InCi(
            device=device,
            feature=feature,
            families=SIZED,
            test=f"tests/engine/test_sized_heads.py::{test}",
            refused=test.endswith(("at_the_start", "is_refused")),
            named=False,
        )
        for device, feature, test in (
            ("CPU", "TP", "test_tensor_parallelism_is_refused_at_the_start"),
            ("CPU", "EP", "test_each_way_answers_as_peft_does"),
            ("one GPU", "base model", "test_a_device_without_a_kernel_is_refused"),
            ("one GPU", "mixed adapters", "test_a_device_without_a_kernel_is_refused"),
        )
    ),
    InCi(
        device="CPU",
        feature="merged",
        families=RECURRENT[:1],
        test="tests/engine/test_recurrent.py::test_merged_weights_answer_as_peft_does",
        named=False,
    ),
)


def matrix() -> str:
    """A table a device, and below the tables the evidence by number."""
    names = dict.fromkeys(_name(one) for one in EVIDENCE)
    numbers = {name: number for number, name in enumerate(names, start=1)}
    parts = []
    for device in DEVICES:
        cells = {
            name: tuple(_cell(device, feature, family, numbers) for feature in FEATURES)
            for family, name in FAMILIES.items()
        }
        if len(set(cells.values())) == 1:
            cells = {"all families": next(iter(cells.values()))}
        parts.append(table((device, *FEATURES), [(name, *row) for name, row in cells.items()]))
    parts.append("\n".join(f"{number}. {name}" for name, number in numbers.items()))
    return "\n\n".join(parts)


def _name(one: InCi | RanOnce) -> str:
    if isinstance(one, InCi):
        return f"`{one.test}`"
    found = records(one.file, one.keeps)
    commits = sorted({record["env"]["git_commit"][:7] for record in found})
    quoted = ", ".join(f"`{commit}`" for commit in commits)
    return f"[{one.file}](../../bench/results/{one.file}), part `{one.part}` ({quoted}): {one.what}"


def _cell(device: str, feature: str, family: str, numbers: dict[str, int]) -> str:
    for one in EVIDENCE:
        if (one.device, one.feature) == (device, feature) and family in one.families:
            word = "ran once" if isinstance(one, RanOnce) else "refused" if one.refused else "tested"
            if isinstance(one, InCi) and one.slow:
                word = "tested, slow"
            return f"{word} ({numbers[_name(one)]})"
    return "never ran"
