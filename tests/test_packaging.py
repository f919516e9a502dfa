# SPDX-License-Identifier: Apache-2.0
"""What an install holds, what starts without torch, and that no file speaks of one machine."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

import moe_lora

ROOT = Path(__file__).parents[1]
TORCH_FREE = (
    *("core", "config", "policies", "cache", "scheduling", "workload", "report", "serve"),
    *("cli.main", "engine.client.client", "dist.cluster", "dist.launch.roles"),
    *("adapters.registry.registry", "adapters.registry.base_model"),
)
HOME = re.compile(rb"/(?:root|home|work|Users)/[\w.-]+|[A-Z]:\\Users\\")
MAX_SEARCHED_BYTES = 1_000_000


def tracked_files() -> list[Path]:
    try:
        done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.decode().split("\0") if name]


def test_each_source_names_its_license() -> None:
    marks = dict.fromkeys((".cpp", ".h", ".inl"), "//") | {".py": "#"}
    sources = [path for path in tracked_files() if path.suffix in marks and path.stat().st_size]
    assert len(sources) > 1000
    for path in sources:
        first, _, _ = path.read_text(encoding="utf-8").partition("\n")
        assert first == f"{marks[path.suffix]} SPDX-License-Identifier: Apache-2.0", path


def run_python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def metadata() -> configparser.ConfigParser:
    found = configparser.ConfigParser()
    found.read(ROOT / "setup.cfg", encoding="utf-8")
    return found


def test_metadata_names_author_license_and_kind() -> None:
    about = metadata()["metadata"]
    assert about["author"] == "The moe_lora authors"
    assert f"Copyright 2026 {about['author']}" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    kinds = about["classifiers"].split("\n")[1:]
    assert {"Operating System :: POSIX :: Linux", "Programming Language :: Python :: 3"} <= set(kinds)
    # PEP 639: the license expression stands alone.
    assert not any(kind.startswith("License ::") for kind in kinds)


def test_what_can_be_built_beside_this_torch_is_built() -> None:
    """It is optional where a compiler can't; here, not to have it would go unseen."""
    import torch.version

    from moe_lora.kernels.cpu import site_linear

    assert (Path(torch.version.__file__).parent / "include/torch/library.h").is_file()
    assert site_linear.has_step_calls, "run python setup.py build_ext --inplace, and look at what it says"


def test_listed_packages_are_those_on_disk() -> None:
    folders = {path.parent.relative_to(ROOT).parts for path in ROOT.glob("moe_lora/**/__init__.py")}
    on_disk = {".".join(parts) for parts in folders} | {"moe_lora.cli"}
    assert (ROOT / "cli" / "__init__.py").is_file()
    assert set(metadata()["options"]["packages"].split()) == on_disk


def test_every_folder_with_code_is_a_package() -> None:
    bare = {
        path.parent for path in ROOT.glob("moe_lora/**/*.py") if not (path.parent / "__init__.py").is_file()
    }
    assert not bare


def test_entry_point_is_the_command() -> None:
    assert metadata()["options.entry_points"]["console_scripts"].split() == [
        "moe-lora",
        "=",
        "moe_lora.cli.main:run",
    ]
    assert run_python("from moe_lora.cli.main import main; print(main.name)") == "main"


def test_parts_start_without_torch() -> None:
    program = f"""
import importlib, pkgutil, sys
for part in {TORCH_FREE}:
    found = importlib.import_module(f"moe_lora.{{part}}")
    for module in pkgutil.iter_modules(getattr(found, "__path__", [])):
        importlib.import_module(f"moe_lora.{{part}}.{{module.name}}")
    if "torch" in sys.modules:
        sys.exit(f"moe_lora.{{part}} imports torch")
"""
    assert run_python(program) == ""


def test_every_folder_has_a_floor() -> None:
    layers = metadata()["importlinter:contract:layers"]["layers"]
    named = set(re.findall(r"moe_lora[\w.]*", layers))
    package = ROOT / "moe_lora"
    folders = [
        f"moe_lora.{path.parent.name}" for path in package.glob("*/__init__.py") if path.parent.name != "dist"
    ]
    folders += [f"moe_lora.dist.{path.parent.name}" for path in package.glob("dist/*/__init__.py")]
    assert set(folders) <= named, set(folders) - named


def test_the_package_imports_its_names_on_first_use() -> None:
    program = """
import sys, moe_lora
print(sorted(name for name in sys.modules if name.startswith("moe_lora.")), "torch" in sys.modules)
assert set(moe_lora.__all__) == set(moe_lora._EXPORTS) | {"__version__"}
moe_lora.SamplingParams, moe_lora.EngineConfig
print("torch" in sys.modules)
"""
    assert run_python(program).splitlines() == ["[] False", "False"]
    assert all(hasattr(moe_lora, name) for name in moe_lora.__all__)


def test_no_tracked_file_names_a_place_on_one_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match.group().decode()}"
        for path in tracked_files()
        if path.is_file() and path.suffix != ".safetensors" and path.stat().st_size < MAX_SEARCHED_BYTES
        for match in [HOME.search(path.read_bytes())]
        if match
    ]
    assert not found


def test_what_ships_fits_the_repository() -> None:
    """Model and adapters of the demo stay within 16 MB."""
    shipped = [path for part in ("model", "adapters") for path in (ROOT / "demo" / part).rglob("*")]
    assert 0 < sum(path.stat().st_size for path in shipped if path.is_file()) <= 16e6
