# SPDX-License-Identifier: Apache-2.0
"""Host workers over the stream of a CUDA device."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from moe_lora.dist.deltas.stream_backend import CudaStream
from moe_lora.lora.backend import AddTo
from tests.dist.host_workers.test_stream import Streamed
from tests.stopped_processes import stop

from .test_remote_backend import STEP, random_rows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_experts", [8, 0], ids=["experts", "dense"])
def test_device_adds_what_workers_and_then_the_engine_have_computed(num_experts, tmp_path):
    """The engine's thread is never held up: all of a step is queued while both workers are stopped."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    # Kernels compile while the workers are stopped: they must not count as hung.
    stream = CudaStream(torch.device("cuda"))
    streamed = Streamed(num_experts, tmp_path, stream=stream, answer_timeout_s=120.0)
    shape, backend, pids = streamed.shape, streamed.backend, streamed.workers.pids
    try:
        for seed, number in ((1, signal.SIGCONT), (2, signal.SIGKILL)):
            generator = torch.Generator().manual_seed(seed)
            for pid in pids:
                stop(pid)
            routing = streamed.routing(random_rows(3, seed))
            backend.begin_step(STEP, routing)
            x = torch.randn(len(routing.row_route), shape.sites[0].in_features, generator=generator)
            y = torch.zeros(len(x), shape.sites[0].total_out_features, device="cuda")
            for layer in (0, 3):
                add_to: AddTo | None = backend.begin(layer, 0, x.cuda(), None)
                assert add_to is not None
                add_to(y)
            assert not torch.cuda.current_stream().query(), "the device waits"
            for pid in pids:
                os.kill(pid, number)
            streamed.stream.synchronize()
            expected = streamed.local_sum(routing.row_route, x, (0, 3), 0)
            assert torch.equal(y.cpu(), expected)
            assert (backend.num_fallback_rows > 0) == (number == signal.SIGKILL)
    finally:
        streamed.workers.close()
