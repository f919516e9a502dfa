# SPDX-License-Identifier: Apache-2.0
"""Train the demo model and its adapters from nothing, on one CPU core, and write them under --out.

    python -m demo.train_demo --out demo

writes OUT/model (a Mixtral checkpoint), OUT/adapters/<name> (PEFT) and OUT/adapters/index.json.
A stopped run, started again, goes on from the last saved state in --work.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save

from demo.training.base import NUM_STEPS, train_base
from demo.training.export import write_adapter, write_base
from demo.training.lora import AdapterPlan, adapter_share_exact, rounded, train_adapter
from demo.training.model import Weights
from demo.training.plans import adapter_plans

_TEST_QUESTIONS = 1000


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for model/ and adapters/")
    parser.add_argument(
        "--work", type=Path, default=Path(".cache/demo_training"), help="folder of saved states"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base-steps", type=int, default=NUM_STEPS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="train these adapters only")
    return parser.parse_args()


def _selected(only: list[str] | None) -> list[AdapterPlan]:
    plans = {plan.name: plan for plan in adapter_plans()}
    unknown = sorted(set(only or []) - set(plans))
    if unknown:
        raise SystemExit(f"--only names no planned adapter: {unknown}; choose from {', '.join(plans)}")
    return [plan for name, plan in plans.items() if only is None or name in only]


def _finished(record_path: Path, wanted: dict) -> dict | None:
    """The record of an adapter trained before by the same plan on the same base, or None."""
    if not record_path.exists():
        return None
    record = json.loads(record_path.read_text())
    return record if {key: record[key] for key in wanted} == wanted else None


def _train_one(base: Weights, base_sha256: str, plan: AdapterPlan, args: argparse.Namespace) -> None:
    record_path = args.work / "adapters" / f"{plan.name}.json"
    wanted = asdict(plan) | {"base_sha256": base_sha256, "seed": args.seed}
    if _finished(record_path, wanted):
        return
    factors = train_adapter(base, plan, args.seed)
    write_adapter(factors, plan, args.out / "adapters" / plan.name)
    exact = adapter_share_exact(base, factors, plan, _TEST_QUESTIONS)
    print(f"{plan.name}: rank {plan.lora_rank}, {exact:.1%} of {_TEST_QUESTIONS} answers exact", flush=True)
    record_path.parent.mkdir(parents=True, exist_ok=True)
    record_path.write_text(json.dumps(wanted | {"exact": exact}, indent=2) + "\n")


def _write_index(work: Path, out: Path) -> None:
    """index.json of all adapters trained so far: what each answers, its rank and how often it is right."""
    index = {}
    for plan in adapter_plans():
        record_path = work / "adapters" / f"{plan.name}.json"
        if record_path.exists():
            record = json.loads(record_path.read_text())
            index[plan.name] = {key: record[key] for key in ("task", "lora_rank", "form", "exact")}
    (out / "adapters" / "index.json").write_text(json.dumps(index, indent=2) + "\n")


def main() -> None:
    """Train what is not trained yet, base first."""
    args = _arguments()
    plans = _selected(args.only)
    torch.set_num_threads(args.threads)
    base = rounded(train_base(args.work / "base.pt", args.seed, args.base_steps))
    write_base(base, args.out / "model")
    base_sha256 = hashlib.sha256(save(base)).hexdigest()
    for plan in plans:
        _train_one(base, base_sha256, plan, args)
        _write_index(args.work, args.out)


if __name__ == "__main__":
    main()
