# SPDX-License-Identifier: Apache-2.0
"""A second CUDA stream: its launches run beside the next launches of the main stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """For steps under capture: a graph replays both branches without the host.

    Each fork is joined before the next fork, and before the capture ends.  Memory of a fork is freed on its
    own stream, and reused after the next fork's wait: later than all launches that read it before the join.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    @property
    def is_open(self) -> bool:
        """True under capture."""
        return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Within the context launches go to the side, after all earlier launches of the main stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Later launches of the main stream wait for the side."""
        torch.cuda.current_stream().wait_stream(self._stream)
