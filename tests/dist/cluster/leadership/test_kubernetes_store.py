# SPDX-License-Identifier: Apache-2.0
"""A Lease over HTTPS; `test_stores.py` has the meaning of each store."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from moe_lora.config.cluster import cluster_of
from moe_lora.core.errors import ConfigError
from moe_lora.dist.cluster.leadership import LostLeaseError, StoreError, kubernetes_store, open_store
from moe_lora.dist.cluster.leadership.kubernetes_store import EPOCH, KubernetesStore
from tests.dist.api_server import ApiServer
from tests.dist.cluster_jobs import free_port

TTL_S = 300.0
"""A call may take a fifth."""
NAME = "moe-lora-controller"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Iterator[ApiServer]:
    api = ApiServer(tmp_path_factory.mktemp("api"))
    api.start()
    yield api
    api.stop()


@pytest.fixture
def api(made, monkeypatch) -> Iterator[ApiServer]:
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    yield made
    made.leases.clear()
    made.before, made.status, made.text = lambda account, method: None, None, None
    made.cut.clear()
    made.unheard.clear()


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    found = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(kubernetes_store, "time", SimpleNamespace(monotonic=lambda: found.now_s))
    return found


def opened(api: ApiServer, account: str, ttl_s: float = TTL_S) -> KubernetesStore:
    return KubernetesStore("default", NAME, ttl_s, api.account(account))


def steps_in(api: ApiServer, store: KubernetesStore, method: str) -> None:
    """`store` takes the lease before the next call of account a with this method."""

    def before(account: str, called: str) -> None:
        if (account, called) == ("a", method):
            api.before = lambda account, method: None
            assert store.acquire("b")[0] == "b"

    api.before = before


def test_the_lease_is_one_that_kubectl_shows(api):
    a = opened(api, "a")
    holder, epoch = a.acquire("a 1f")
    a.renew()
    spec, metadata = api.leases[NAME]["spec"], api.leases[NAME]["metadata"]
    assert (holder, spec["holderIdentity"], spec["leaseDurationSeconds"]) == ("a 1f", "a 1f", TTL_S)
    assert spec["leaseTransitions"] == 1
    assert spec["renewTime"] > spec["acquireTime"]
    assert metadata["annotations"] == {EPOCH: str(epoch)}
    a.release()
    b = opened(api, "b")
    assert b.acquire("b 2f")[1] > epoch
    assert api.leases[NAME]["spec"]["leaseTransitions"] == 2


@pytest.mark.parametrize("exists", [False, True])
def test_one_of_two_that_see_a_free_lease_has_it(api, exists):
    a, b = opened(api, "a"), opened(api, "b")
    if exists:
        a.acquire("former")
        a.release()
    found: list[tuple[str, int]] = []

    def step_in(account: str, method: str) -> None:
        if (account, method) == ("a", "PUT" if exists else "POST"):
            api.before = lambda account, method: None
            found.append(b.acquire("b"))

    api.before = step_in
    assert a.acquire("a") == found[0]
    assert found[0][0] == "b"
    b.renew()


def test_a_renewal_that_comes_after_another_s_lease_is_lost(api, clock):
    a, b = opened(api, "a"), opened(api, "b")
    first = a.acquire("a")
    assert b.acquire("b") == first
    clock.now_s += TTL_S
    steps_in(api, b, "PUT")
    with pytest.raises(LostLeaseError, match=f"another controller has Lease {NAME}"):
        a.renew()
    b.renew()
    a.release()
    b.renew()


def test_others_may_edit_the_lease_of_a_leader(api):
    a = opened(api, "a")
    a.acquire("a")
    api.leases[NAME]["metadata"]["labels"] = {"team": "serving"}
    api.edit(NAME)
    a.renew()
    assert api.leases[NAME]["metadata"]["labels"] == {"team": "serving"}


def test_a_renewal_makes_a_deleted_lease_again_and_the_next_epoch_is_higher(api, clock):
    a, b = opened(api, "a"), opened(api, "b")
    first = a.acquire("a")
    for _ in range(2):
        api.delete(NAME)
        a.renew()
        assert b.acquire("b") == first
    clock.now_s += TTL_S
    holder, epoch = opened(api, "c").acquire("c")
    assert (holder, epoch) == first, "a new process waits"
    holder, epoch = b.acquire("b")
    assert holder == "b"
    assert epoch > first[1]


def test_a_lease_that_another_made_after_the_deletion_is_lost(api):
    a, b = opened(api, "a"), opened(api, "b")
    a.acquire("a")
    api.delete(NAME)
    steps_in(api, b, "POST")
    with pytest.raises(LostLeaseError, match=f"another controller has Lease {NAME}"):
        a.renew()
    b.renew()


@pytest.mark.parametrize("renewed", ["1970-01-01T00:00:00.000000Z", "2199-01-01T00:00:00.000000Z"])
def test_a_lease_ends_by_the_standby_s_own_time_whatever_other_clocks_say(api, clock, renewed):
    a, b = opened(api, "a"), opened(api, "b", ttl_s=250.0)
    first = a.acquire("a")
    api.edit(NAME, renewTime=renewed)
    assert b.acquire("b") == first
    clock.now_s += TTL_S - 1
    assert b.acquire("b") == first, "the leader's ttl_s counts"
    clock.now_s += 1
    assert b.acquire("b")[0] == "b"


def test_a_new_process_waits_as_long_as_any(api, clock):
    a, b = opened(api, "a"), opened(api, "b")
    first = a.acquire("a")
    clock.now_s += 10 * TTL_S
    assert b.acquire("b") == first
    clock.now_s += TTL_S
    assert b.acquire("b")[0] == "b"


def test_the_lease_of_a_backup_has_a_higher_epoch_still(api):
    a = opened(api, "a")
    a.acquire("a")
    api.leases[NAME]["metadata"]["annotations"][EPOCH] = "900000000000"
    api.edit(NAME, holderIdentity="")
    assert opened(api, "b").acquire("b") == ("b", 900000000001)


def test_a_write_whose_answer_is_lost_counts(api):
    a = opened(api, "a")

    def lose(account: str, method: str) -> None:
        if method == "PUT":
            api.unheard.add(account)

    for call in (lambda: a.acquire("a"), a.renew):
        api.before = lose
        with pytest.raises(StoreError, match="the API server does not answer"):
            call()
        api.before = lambda account, method: None
        api.unheard.clear()
        assert a.acquire("a")[0] == "a"
        a.renew()
    assert api.leases[NAME]["spec"]["leaseTransitions"] == 1


def test_a_cut_off_leader_is_told_so(api):
    a, b = opened(api, "a"), opened(api, "b")
    first = a.acquire("a")
    api.cut.add("a")
    a._ttl_s = 0.5  # of this call alone, which must fail
    with pytest.raises(StoreError, match=r"the API server does not answer .*timed out"):
        a.renew()
    assert b.acquire("b") == first
    api.cut.clear()
    a._ttl_s = TTL_S
    a.renew()


def test_a_lease_renews_with_a_replaced_token(api):
    a = opened(api, "a")
    a.acquire("a")
    api.account("a")
    a.renew()


def test_a_lease_renews_after_a_change_of_the_authority(tmp_path, monkeypatch):
    api = ApiServer(tmp_path)
    api.start()
    try:
        for name, value in api.environment.items():
            monkeypatch.setenv(name, value)
        a = opened(api, "a")
        a.acquire("a")
        api.stop()
        api.change_authority()
        api.account("a")
        api.start()
        a.renew()
    finally:
        api.stop()


@pytest.mark.parametrize("text", ["x", "", "-5", "1e5", "9" * 30])
def test_an_unreadable_epoch_counts_as_none(api, text):
    a = opened(api, "a")
    _, epoch = a.acquire("a")
    api.leases[NAME]["metadata"]["annotations"][EPOCH] = text
    api.edit(NAME)
    b = opened(api, "b")
    assert b.acquire("b") == ("a", 0)
    with pytest.raises(LostLeaseError):
        a.renew()
    a.release()
    assert b.acquire("b")[1] > epoch


@pytest.mark.parametrize(
    ("status", "text", "message"),
    [
        (429, b"Too many requests\n", r"refuses PUT of Lease .* \(429: Too many requests\)$"),
        (503, b"<html>Away</html>", r"refuses .* \(503: <html>Away</html>\)$"),
        (500, b"null", r"refuses .* \(500: null\)$"),
        (401, b"Unauthorized", r"refuses .* \(401: Unauthorized\); the service account needs"),
        (None, b"null", "answers 200 without an object"),
        (None, b"\xff", "answers 200 without an object"),
    ],
)
def test_an_answer_without_an_object_is_named(api, status, text, message):
    a = opened(api, "a")
    a.acquire("a")
    api.status, api.text = status, text
    with pytest.raises(StoreError, match=message):
        a.renew()


def test_a_namespace_that_is_not_there_is_named(api, monkeypatch):
    answer = api._failed(404, 'namespaces "default" not found')
    monkeypatch.setattr(api, "_create", lambda name, body: answer)
    with pytest.raises(StoreError, match=r'refuses POST .* \(404: namespaces "default" not found\)$'):
        opened(api, "a").acquire("a")


def test_an_unreadable_token_is_named(api, tmp_path):
    a = opened(api, "a")
    token = a._folder / "token"
    token.write_bytes(b"\xff")
    for _ in range(2):
        with pytest.raises(StoreError, match=rf"token or authority in {a._folder} can't be read"):
            a.acquire("a")
        token.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, r"refuses .* \(401: "),
        (403, r"refuses .* \(403: .*needs get, create and update of leases"),
        (500, r"refuses .* \(500: .*\)$"),
    ],
)
def test_a_refusal_is_no_loss_of_the_lease(api, status, message):
    a = opened(api, "a")
    a.acquire("a")
    api.status = status
    for call in (a.renew, lambda: a.acquire("a"), a.release):
        with pytest.raises(StoreError, match=message):
            call()
    api.status = None
    a.renew()


def test_without_an_api_server_nobody_leads_and_a_leader_may_go_on_once_it_is_back(api):
    a = opened(api, "a")
    a.acquire("a")
    api.stop()
    try:
        for call in (a.renew, lambda: a.acquire("a"), a.release):
            with pytest.raises(StoreError, match=r"the API server does not answer .*; start the API server"):
                call()
    finally:
        api.start()
    a.renew()
    opened(api, "b").release()  # no lease, no call


def test_another_server_at_the_address_is_not_trusted(api, tmp_path):
    other = ApiServer(tmp_path, "127.0.0.2")
    folder = other.account("a")
    with pytest.raises(StoreError, match=r"no TLS .*CERTIFICATE_VERIFY_FAILED"):
        KubernetesStore("default", NAME, TTL_S, folder).acquire("a")


def test_a_lease_needs_a_pod(tmp_path, monkeypatch):
    content = {
        "model_dir": "m",
        "controllers": {name: {"address": f"{name}:1", "engines_address": f"{name}:2"} for name in "ab"},
        "leadership": {"store": f"kubernetes://default/{NAME}"},
        "front_end": {"engines_address": "f:1"},
    }
    cluster = cluster_of(content, tmp_path)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match=r"needs a pod .*KUBERNETES_SERVICE_HOST"):
        open_store(cluster)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "tcp")
    with pytest.raises(ConfigError, match=r"needs a pod .*tcp"):
        open_store(cluster)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(free_port()))
    with pytest.raises(ConfigError, match=r"needs a pod .*; set automountServiceAccountToken"):
        KubernetesStore("default", NAME, TTL_S, tmp_path)
