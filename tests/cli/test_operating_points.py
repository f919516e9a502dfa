# SPDX-License-Identifier: Apache-2.0
"""`moe-lora profile-steps` and `operating-points` on the demo model: what they write, what they refuse."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from moe_lora import LLM, SamplingParams
from moe_lora.cli import operating_points as command
from moe_lora.cli import profile_steps
from moe_lora.cli.main import main
from moe_lora.cli.profile_steps import good_models
from moe_lora.config import FrontEndConfig
from moe_lora.core.errors import ConfigError, SloError
from moe_lora.dist.cluster.controller.routes import make_routes
from moe_lora.dist.host_workers.profile import read_host_times
from moe_lora.provision.operating_points import OperatingPoint, read_operating_points
from moe_lora.provision.performance_models import read_step_model
from tests.dist.cluster.fleet_parts import cluster_config

MODEL = str(Path(__file__).parents[2] / "demo" / "model")
SMALL = ["--ranks", "4,16", "--threads", "1", "--eager"]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    model = shutil.copytree(MODEL, folder / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 70}))
    words = ["--batches", "1,2,4", "--adapters", "2", "--mixed", "12", "--rounds", "1", "--max-tokens", "96"]
    result = CliRunner().invoke(
        main,
        [
            *("profile-steps", str(model), "--out", str(folder / "steps.json"), *SMALL, *words),
            *("--lora-kernel", "bgmv", "--host-worker"),
            "--force",  # few batches on a busy machine make a bad model
        ],
    )
    assert result.exit_code == 0, result.output
    assert "batches held out" in result.output
    assert "batches timed" in result.stderr
    assert (
        "host worker: prompts of up to 67 tokens, not --max-tokens 96: the model's length is 70"
        in (result.stderr.splitlines()[0])
    )
    assert "a worker computes c = " in result.output
    assert "waiting is quicker" in result.output
    return folder


def test_profile_holds_models_and_what_they_were_fitted_to(profiled: Path) -> None:
    model = read_step_model(profiled / "steps.json")
    assert (model.kernel, model.form) == ("bgmv", "full")
    content = json.loads((profiled / "steps.json").read_text())
    assert content["settings"]["ranks"] == [4, 16]
    assert content["env"]["cpu_cores"]
    assert {step["phase"] for step in content["steps"]} == {"prefill", "decode"}


def test_engine_takes_the_times_of_host_workers(profiled: Path) -> None:
    """They were measured on this machine with this model: nothing is refused, and c is theirs."""
    path = str(profiled / "steps.json")
    times = read_host_times(path)
    assert set(times.worker) == {"q+k+v", "o", "router", "gate+up", "down"}
    assert times.device.seconds(64, 16) > 0
    assert times.load_s(times.adapter(16)) > 0
    assert all(times.worker_s(64, times.adapter(rank)) > 0 for rank in (4, 16))
    measured = {
        (one["what"], one["lora_rank"]) for one in json.loads(Path(path).read_text())["host"]["samples"]
    }
    assert {("device", 4), ("down", 16), ("load", 4)} <= measured
    with LLM(MODEL, eager=True, host_workers=1, performance_model=path, num_threads=1) as llm:
        assert llm.generate([[1, 2, 3]], None, SamplingParams(max_tokens=2))


@pytest.mark.parametrize("form", ["full", "toppings"])
def test_routers_take_the_profile(profiled: Path, form: str) -> None:
    settings = {"performance_model": str(profiled / "steps.json"), "performance_form": form}
    for name in ("rank_aware", "shortest_pending_time"):
        make_routes(cluster_config(FrontEndConfig(routing=name, **settings), lora_kernel="bgmv"))
    with pytest.raises(ConfigError, match=f"no {form} model of kernel 'sgmv'; it has bgmv"):
        make_routes(cluster_config(FrontEndConfig(routing="rank_aware", **settings)))


def test_points_simulated_from_the_profile(profiled: Path) -> None:
    out = profiled / "points.json"
    words = ["--out", str(out), "--simulate", str(profiled / "steps.json"), "--lora-kernel", "bgmv"]
    words += ["--ranks", "4,16"]
    slo = ["--slo-ttft-s", "1", "--slo-tpot-s", "1", "--duration-s", "5", "--max-num-seqs", "4"]
    result = CliRunner().invoke(main, ["operating-points", *words, *slo, "--repeats", "1"])
    assert result.exit_code == 0, result.output
    assert list(read_operating_points(out)) == [4, 16]
    assert json.loads(out.read_text())["kind"] == "simulated"


def test_points_measured_on_an_engine(tmp_path: Path) -> None:
    out = tmp_path / "points.json"
    lengths = ["--prompt-tokens", "8", "--output-tokens", "4", "--num-requests", "10", "--adapters", "2"]
    search = ["--repeats", "1", "--tolerance", "1", "--start-per-s", "200", "--duration-s", "0.3"]
    slo = ["--slo-ttft-s", "0.5", "--slo-tpot-s", "0.5", "--max-num-seqs", "2"]
    words = ["operating-points", MODEL, "--out", str(out), *SMALL, *lengths, *search, *slo]
    result = CliRunner().invoke(main, words)
    assert "rank 4: building an engine" in result.stderr
    if result.exit_code:  # on a busy machine no rate may hold the SLO
        assert "the SLO" in result.output
        return
    content = json.loads(out.read_text())
    assert content["kind"] == "measured"
    assert set(content["operating_points"]) == {"4", "16"}
    assert content["slo"] == {"ttft_s": 0.5, "tpot_s": 0.5}
    assert all(search["trials"] for search in content["searches"])


SLO = ("--slo-ttft-s", "1", "--slo-tpot-s", "1")


@pytest.mark.parametrize(
    ("end", "found", "status", "message"),
    [
        (SloError("rank 8: no rate holds"), {"4", "16"}, 1, "no point of rank 8: rank 8: no rate holds"),
        (KeyboardInterrupt(), {"4"}, 130, "no point of rank 8: Ctrl-C stopped the search"),
    ],
)
def test_found_points_are_written_though_a_rank_fails(
    end: BaseException, found: set, status: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(*_: object, lora_rank: int, **more: object) -> OperatingPoint:
        if lora_rank == 8:
            raise end
        numbers = dict.fromkeys(("rate_per_s", "fails_at_per_s", "tokens_per_s"), 2.0)
        return OperatingPoint(lora_rank=lora_rank, trials=(), **numbers)

    monkeypatch.setattr(command, "_runs", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr("moe_lora.provision.operating_points.find_operating_point", search)
    out = tmp_path / "points.json"
    words = ["operating-points", "--simulate", __file__, "--ranks", "4,8,16", *SLO, "--out", str(out)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == status
    assert message in result.stderr
    assert {str(rank) for rank in read_operating_points(out)} == found
    out.unlink()
    words[words.index("4,8,16")] = "8"
    result = CliRunner().invoke(main, words)
    assert result.exit_code != 0
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["profile-steps", MODEL, "--ranks", "8,x"], "not a list of whole numbers, as 8,16,32"),
        (["profile-steps", MODEL, "--ranks", "8,1024"], "outside 1 to 512"),
        (
            ["operating-points", *SLO],
            "give either MODEL_DIR or --simulate",
        ),
        (["operating-points", MODEL, "--slo-ttft-s", "0", "--slo-tpot-s", "1"], "slo.ttft_s=0.0 must be"),
        (
            ["operating-points", "--simulate", __file__, "--quantize", "int8", *SLO],
            "--simulate takes times and weights' format from its FILE; leave --quantize out",
        ),
        *(
            (["operating-points", "--simulate", __file__, *words, *SLO], f"leave {words[0]} out")
            for words in (["--device", "cpu"], ["--dtype", "auto"], ["--eager"], ["--threads", "1"])
        ),
        (["operating-points", MODEL, "--slo-ttft-s", "1"], "Missing option '--slo-tpot-s'"),
    ],
)
def test_bad_input_is_refused(words: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "out.json")])
    assert result.exit_code != 0
    assert message in result.output
    assert not (tmp_path / "out.json").exists()


def no_engine(*arguments: object, **more: object) -> None:
    raise AssertionError("an engine was built")


def test_too_few_batches_are_refused_before_an_engine_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_lora.profiling.step_times.StepClock", no_engine)
    words = ["profile-steps", MODEL, "--ranks", "16", "--batches", "1,2", "--mixed", "0"]
    result = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "out.json")])
    assert result.exit_code == 1
    assert "steps to fit 6 coefficients to" in result.output
    assert "building an engine" not in result.output


def test_bad_models_are_refused_before_host_workers_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = {"kernel": "sgmv", "form": "full", "quality": {}}
    bad["quality"] = {"decode": {"r2_held_out": 0.1, "mean_error": 1.0, "num_held_out": 3}}
    monkeypatch.setattr(profile_steps, "measured_models", lambda *_: {"models": [bad]})
    monkeypatch.setattr(profile_steps, "measured_host", no_engine)
    out = tmp_path / "out.json"
    result = CliRunner().invoke(main, ["profile-steps", MODEL, "--host-worker", "--out", str(out)])
    assert result.exit_code == 1
    assert "less than 0.9, so nothing was written" in result.output


def model_of(form: str, r2: float | None) -> dict:
    return {"kernel": "sgmv", "form": form, "quality": {"decode": {"r2_held_out": r2}}}


def test_models_that_tell_times_badly_are_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    good, coarse = model_of("full", 0.95), model_of("toppings", 0.8)
    assert good_models([coarse, good]) == [good]
    assert "left out: the sgmv model of form toppings" in capsys.readouterr().out
    for r2 in (0.89, None):
        with pytest.raises(ConfigError, match=r"less than 0.9, so nothing was written; .* give --force"):
            good_models([model_of("full", r2)])
