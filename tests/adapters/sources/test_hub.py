# SPDX-License-Identifier: Apache-2.0
"""Adapters of a hub, over a hub on loopback."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from moe_lora.adapters import sources as package
from moe_lora.adapters.peft.files import CONFIG_FILE, MLX_FILE, WEIGHTS_FILE
from moe_lora.adapters.sources import AdapterSources
from moe_lora.config.optional_parts import SourcesConfig
from moe_lora.core.errors import AdapterError, PeerUnreachableError
from tests.adapters.peft_folders import peft_folder
from tests.loopback_hub import TOKEN, Hub, reached_hub
from tests.patience import PATIENCE_S


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with reached_hub(monkeypatch) as found:
        found.folders["acme/support"] = peft_folder(tmp_path / "repo", 1)
        yield found


def sources(tmp_path: Path, *allow: str, **settings) -> AdapterSources:
    return AdapterSources(SourcesConfig(allow=allow, folder=str(tmp_path / "cache"), **settings))


def test_an_allowed_address_becomes_a_folder_with_the_same_files(hub: Hub, tmp_path: Path) -> None:
    found = Path(sources(tmp_path, "hf://acme/*").local("hf://acme/support"))
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        assert (found / name).read_bytes() == (tmp_path / "repo" / name).read_bytes()
    assert (tmp_path / "cache") in found.parents
    assert found.name == hub.commit("acme/support")


def test_the_tensors_of_mlx_lm_are_fetched(hub: Hub, tmp_path: Path) -> None:
    repo, further = tmp_path / "repo", tmp_path / "repo" / "0000100_adapters.safetensors"
    (repo / WEIGHTS_FILE).rename(repo / MLX_FILE)
    further.write_bytes(b"an earlier step")
    found = Path(sources(tmp_path, "hf://acme/*").local("hf://acme/support"))
    assert {one.name for one in found.iterdir()} == {CONFIG_FILE, MLX_FILE}
    assert (found / MLX_FILE).read_bytes() == (repo / MLX_FILE).read_bytes()
    (repo / WEIGHTS_FILE).write_bytes((repo / MLX_FILE).read_bytes())  # the config tells which counts
    found = Path(sources(tmp_path, "hf://acme/*").local("hf://acme/support"))
    assert {one.name for one in found.iterdir()} == {CONFIG_FILE, MLX_FILE, WEIGHTS_FILE}


def test_a_second_fetch_transfers_nothing_and_a_new_commit_only_what_changed(
    hub: Hub, tmp_path: Path
) -> None:
    fetcher = sources(tmp_path, "hf://acme/*")
    first = fetcher.local("hf://acme/support")
    hub.calls.clear()
    assert fetcher.local("acme/support") == first
    assert hub.calls == []
    peft_folder(tmp_path / "repo", 2)
    second = fetcher.local("hf://acme/support")
    assert second != first
    assert hub.calls == [WEIGHTS_FILE]
    assert Path(first, WEIGHTS_FILE).read_bytes() != Path(second, WEIGHTS_FILE).read_bytes()


def test_the_last_two_commits_of_each_address_stay(hub: Hub, tmp_path: Path) -> None:
    fetcher = sources(tmp_path, "hf://acme/*")
    pinned = fetcher.local(f"hf://acme/support@{hub.commit('acme/support')}")
    places = [Path(fetcher.local("hf://acme/support"))]
    for seed in (2, 3):
        os.utime(places[-1], ns=(seed, seed))
        peft_folder(tmp_path / "repo", seed)
        places.append(Path(fetcher.local("hf://acme/support")))
    assert [(one / WEIGHTS_FILE).is_file() for one in places] == [False, True, True]
    assert len([*places[0].parents[1].glob("blobs/*")]) == 3  # two states of the weights, one configuration
    assert Path(pinned, WEIGHTS_FILE).is_file()
    peft_folder(tmp_path / "repo", 2)  # back again
    assert Path(fetcher.local("hf://acme/support")) == places[1]
    assert (places[2] / WEIGHTS_FILE).is_file()


def test_a_commit_that_was_fetched_within_a_day_stays(hub: Hub, tmp_path: Path) -> None:
    """Also one that was there already: its snapshot has the time of the last fetch."""
    fetcher = sources(tmp_path, "hf://acme/*")

    def fetched(content: int) -> Path:
        peft_folder(tmp_path / "repo" / "math", content)
        return Path(fetcher.local("hf://acme/support/math"))

    places = [fetched(content) for content in (1, 2, 3)]
    assert all((one / WEIGHTS_FILE).is_file() for one in places)
    for number, one in enumerate(places):
        os.utime(one.parent, (number, number))
    assert fetched(1) == places[0]
    assert [(one / WEIGHTS_FILE).is_file() for one in places] == [True, False, True]
    fetched(4)
    assert [(one / WEIGHTS_FILE).is_file() for one in places] == [True, False, False]


def test_the_longest_unused_addresses_make_room(hub: Hub, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(package, "_KEPT_ADAPTERS", 1)
    num_bytes = sum(one.stat().st_size for one in (tmp_path / "repo").iterdir() if one.is_file())
    fetcher = sources(tmp_path, "hf://acme/*", max_gb=1.5 * num_bytes / 1e9)
    places = []
    for folder in ("a", "b", "a", "c"):
        peft_folder(tmp_path / "repo" / folder, 1)
        places.append(Path(fetcher.local(f"hf://acme/support/{folder}")))
        whole = next(one for one in places[-1].parents if one.parent.name == "hub")
        if folder == "b":
            os.utime(whole, (1, 1))
    assert [one.exists() for one in places] == [True, False, True, True]


def test_a_failed_removal_of_former_commits_fails_no_fetch(
    hub: Hub, tmp_path: Path, monkeypatch, caplog
) -> None:
    import huggingface_hub

    def gone(place: Path) -> None:
        raise FileNotFoundError(f"{place}/refs/main")  # another server removed it meanwhile

    fetcher = sources(tmp_path, "hf://acme/*")
    for seed in (1, 2, 3):
        peft_folder(tmp_path / "repo", seed)
        place = Path(fetcher.local("hf://acme/support"))
        os.utime(place, ns=(seed, seed))
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", gone)
    peft_folder(tmp_path / "repo", 4)
    assert (Path(fetcher.local("hf://acme/support")) / WEIGHTS_FILE).is_file()
    assert "former commits stay" in caplog.text


def test_a_revision_and_a_folder_of_the_repository(hub: Hub, tmp_path: Path) -> None:
    peft_folder(tmp_path / "repo" / "math", 7)
    commit = hub.commit("acme/support")
    found = Path(sources(tmp_path, "hf://acme/support").local(f"hf://acme/support@{commit}/math"))
    assert (found / WEIGHTS_FILE).read_bytes() == (tmp_path / "repo" / "math" / WEIGHTS_FILE).read_bytes()


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("hf://evil/x", "is not allowed; sources.allow has hf://acme/*"),
        ("hf://acme/../evil/x", "is not allowed"),
        ("hf://acme/sup\nport", "is not allowed"),
        ("hf://acme/" + "x" * 2000, "is not allowed"),
        ("hf://acme", "is not allowed"),
        ("hf://acme/nobody", "is not on the hub, or needs a token: set HF_TOKEN"),
        ("hf://acme/support@v9", "is not on the hub"),
        ("hf://acme/support/math", f"has no {CONFIG_FILE} (it has no files)"),
        ("ftp://acme/support", "no adapters come from ftp://"),
        ("hf://acme/sup port", "give hf://ORG/NAME"),
    ],
)
def test_other_addresses_are_refused_by_name(hub: Hub, tmp_path: Path, address: str, reason: str) -> None:
    with pytest.raises(AdapterError) as error:
        sources(tmp_path, "hf://acme/*").local(address)
    assert reason in str(error.value)


def test_a_pickle_and_a_large_adapter_are_refused_before_any_transfer(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"sources.max_gb=1e-09"):
        sources(tmp_path, "hf://acme/*", max_gb=1e-9).local("hf://acme/support")
    (tmp_path / "repo" / WEIGHTS_FILE).rename(tmp_path / "repo" / "adapter_model.bin")
    with pytest.raises(AdapterError, match="is a pickle, which can run code"):
        sources(tmp_path, "hf://acme/*").local("hf://acme/support")
    assert hub.calls == []


def test_an_unstated_size_is_refused_and_a_slash_at_the_end_means_nothing(
    hub: Hub, tmp_path: Path, monkeypatch
) -> None:
    fetcher = sources(tmp_path, "hf://acme/support")
    assert fetcher.local("hf://acme/support/") == fetcher.local("hf://acme/support")
    monkeypatch.setattr(hub, "states_sizes", False)
    with pytest.raises(AdapterError, match=r"states no size of adapter_config\.json"):
        fetcher.local("hf://acme/support")


def test_only_some_fetches_run_at_once(hub: Hub, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("moe_lora.adapters.sources._FETCHES", threading.BoundedSemaphore(1))
    started, go_on = threading.Event(), threading.Event()

    def slow(*args: object) -> Path:
        started.set()
        assert go_on.wait(PATIENCE_S)
        return tmp_path

    monkeypatch.setattr("moe_lora.adapters.sources.hub.fetch", slow)
    fetcher = sources(tmp_path, "hf://acme/*")
    first = threading.Thread(target=fetcher.local, args=["hf://acme/support"])
    first.start()
    try:
        assert started.wait(PATIENCE_S)
        with pytest.raises(PeerUnreachableError, match="adapters are in transfer"):
            fetcher.local("hf://acme/support")
    finally:
        go_on.set()
        first.join()
    assert fetcher.local("hf://acme/support") == str(tmp_path)


def test_a_private_repository_needs_the_token_and_the_token_is_not_logged(
    hub: Hub, tmp_path: Path, monkeypatch, caplog
) -> None:
    hub.private.add("acme/support")
    fetcher = sources(tmp_path, "hf://acme/*")
    with caplog.at_level(logging.DEBUG):
        with pytest.raises(AdapterError, match="HF_TOKEN"):
            fetcher.local("hf://acme/support")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert Path(fetcher.local("hf://acme/support"), WEIGHTS_FILE).is_file()
    assert TOKEN not in caplog.text


def test_without_the_section_nothing_is_fetched(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"--set sources.allow=hf://ORG/\*"):
        AdapterSources(None).local("hf://acme/support")
    assert AdapterSources(None).local("acme/support") == "acme/support"
    assert sources(tmp_path, "hf://other/*").local("acme/support") == "acme/support"


def test_a_folder_comes_before_the_hub(hub: Hub, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    peft_folder(tmp_path / "acme" / "support", 3)
    assert sources(tmp_path, "hf://acme/*").local("acme/support") == "acme/support"


def test_a_hub_without_an_answer_is_a_passing_failure(hub: Hub, tmp_path: Path, monkeypatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(PeerUnreachableError, match="can't be fetched now"):
        sources(tmp_path, "hf://acme/*").local("hf://acme/support")
