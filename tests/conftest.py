# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import os
import signal
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from typing import Any
from unittest import mock

import certifi
import hypothesis
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG

from .forked_children import Forks, children_are_forked, children_start_anew
from .patience import PATIENCE_S

# The compiler would ask the C++ compiler whether this machine's vectors can be used: 8 s of CPU time.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# A shell's background job ignores SIGINT, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# One commit's tests find the same each time, in 40 examples; `--hypothesis-profile=default` looks for more.
# No timing decides: beside other work an example may take any time.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("same", derandomize=True, deadline=None, max_examples=40)
hypothesis.settings.load_profile("same")


def pytest_collection_finish() -> None:
    """Collect garbage rarely, and not among modules and collected tests: a tenth of a run's CPU time."""
    gc.collect()
    gc.freeze()
    young, *older = gc.get_threshold()
    gc.set_threshold(10 * young, *older)


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory) -> Iterator[None]:
    """What servers keep beyond a process does not go to the user's own folder."""
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    yield
    if before is None:
        del os.environ["XDG_STATE_HOME"]
    else:
        os.environ["XDG_STATE_HOME"] = before


@pytest.fixture(scope="session", autouse=True)
def authorities_read_once() -> Iterator[None]:
    """Each client of httpx would read the public authorities anew: 24 ms of CPU time for a GET of a test."""
    make = ssl.create_default_context
    made = cache(lambda cafile: make(cafile=cafile))
    public = {certifi.where(), os.environ.get("SSL_CERT_FILE")}

    def context(*args: Any, cafile: str | None = None, **options: Any) -> ssl.SSLContext:
        if cafile in public and cafile and not args and not options:
            return made(cafile)
        return make(*args, cafile=cafile, **options)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(ssl, "create_default_context", context))
        if find_spec("httpcore2"):  # of the client of OpenAI
            import httpcore2

            of_system = cache(httpcore2.default_ssl_context)
            patches.enter_context(mock.patch.object(httpcore2, "default_ssl_context", of_system))
        yield


@pytest.fixture(scope="session", autouse=True)
def patient_clients() -> Iterator[None]:
    """A client of httpx without a limit of its own would give up after five seconds."""
    limits = dict.fromkeys(("connect", "read", "write", "pool"), PATIENCE_S)
    with mock.patch.multiple(DEFAULT_TIMEOUT_CONFIG, **limits):
        yield


@pytest.fixture(scope="session", autouse=True)
def forks() -> Iterator[Forks | None]:
    """What the product starts as processes does not import torch anew; None: on this system it does."""
    with children_are_forked() as found:
        yield found


@pytest.fixture
def start_anew(forks: Forks | None) -> Iterator[None]:
    """Processes are started as outside of tests."""
    with children_start_anew():
        yield
