# SPDX-License-Identifier: Apache-2.0
"""The LoraBackend with device puts to the LoRA Server: no host work between layers.

A step's slots and generations go to all server ranks at its start.  A site is a put to its ranks, the base
GEMM, a wait for signals, and an addition: stream operations, captured in the step's CUDA graph.

Bounded waits and missing rows are recorded on the device; `settled` reads the record after the step.  A
failed step is repeated over `remote_backend`.

Source: InfiniLoRA sections 3 and 5.1.
"""

from __future__ import annotations

import logging
from functools import partial

import torch

from moe_lora.dist.transport.device_puts import PUT_BLOCKS, STATUS_BYTES, DevicePuts
from moe_lora.kernels.operands import StepTables
from moe_lora.lora.backend import AddTo, LoraBackend
from moe_lora.lora.row_routing import RowRouting, Source

from .device_frames import DeviceFrames, DeviceHalf

logger = logging.getLogger(__name__)


class PushedBackend(LoraBackend, DeviceHalf):
    """The backend of a single-process instance.

    group, frames: see `DeviceFrames`.  client: the instance's number.  num_steps: started; num_redone:
    without full answers.  lost: an answer was late; the backend is off for good, as puts may still be under
    way and no member can rejoin.
    """

    def __init__(self, group: DevicePuts, frames: DeviceFrames, client: int, answer_timeout_s: float) -> None:
        window = group.alloc(frames.num_bytes, frames.num_signals)
        super().__init__(group, window, frames, client, answer_timeout_s)
        self._frame: torch.Tensor | None = None
        self._is_under_way = False
        self.lost = False
        self.num_steps = self.num_redone = 0
        group.meet()

    def takes(self, routing: RowRouting, num_rows: int, *, decode: bool) -> bool:
        """True if this step's leased rows can use puts."""
        leased = [sources for sources in routing.sources if Source.LEASED in sources]
        return (
            decode
            and not self.lost
            and num_rows <= self._frames.max_rows
            and len(leased) == 1
            and routing.terms.shape[2] == 1
            and not routing.loading.any()
        )

    def settled(self) -> bool:
        """True if the last step was answered in full; waits for the step.  Logs the cause otherwise."""
        self._is_under_way = False
        self.num_steps += 1
        state = int(self.state.item())
        if not state:
            return True
        self.num_redone += 1
        if state & self._exchange.LOST:
            self.lost = True
            logger.error(
                "the LoRA Server did not answer puts in time; until all its ranks and instances are started "
                "together again, it is asked over lora_server.transport"
            )
        else:
            self.state.zero_()
            logger.info("the LoRA Server lacked rows of a step, which is computed again")
        return False

    def begin_step(self, step: StepTables, routing: RowRouting) -> None:
        pushed = (one for (source, _), one in routing.on_device.items() if source == Source.PUSHED)
        self._frame = next(pushed, None)
        if self._frame is None:
            (frame,) = routing.frames_pushed().values()
            self._frame = torch.from_numpy(frame).to(self._group.device)
        self._is_under_way = True
        frames, client = self._frames, self._client
        laid = self._laid(frames.frame_at(client), self._frame)
        for server_rank in range(frames.num_ranks):
            self._group.put_pieces(self._window, [laid], frames.asked(client), server_rank)

    def abandon_step(self) -> None:
        """Half a step ends these puts: a server rank waits for every site of a step in a fixed order."""
        if self._is_under_way and not self.lost:
            self._is_under_way, self.lost = False, True
            logger.error(
                "a step of puts to the LoRA Server failed; until all its ranks and instances are started "
                "together again, rows go over lora_server.transport"
            )

    def _laid(self, offset_bytes: int, values: torch.Tensor) -> tuple[int, int]:
        there = self._window.bytes[offset_bytes : offset_bytes + values.nbytes]
        there.view(values.dtype).view(values.shape).copy_(values)
        return offset_bytes, values.nbytes

    def begin(self, layer: int, site: int, x: torch.Tensor, ids: torch.Tensor | None) -> AddTo | None:
        frames, client = self._frames, self._client
        pieces = [self._laid(frames.x_at(client, site), x)]
        if ids is not None:
            pieces.append(self._laid(frames.ids_at(client, site), ids))
        ranks = frames.partition.servers_of_client(0, layer, site)
        for server_rank in ranks:
            self._group.put_pieces(self._window, pieces, frames.asked(client, site), server_rank)
        return partial(self._add_to, range(ranks[0], ranks[-1] + 1), site, ids)

    def _add_to(self, ranks: range, site: int, ids: torch.Tensor | None, y: torch.Tensor) -> None:
        frames, frame = self._frames, self._frame
        assert frame is not None, "begin_step comes first"
        numbers = frames.answers_of(ranks, site)
        first, last = (frames.status_at(self._client, rank, site) for rank in (ranks[0], ranks[-1]))
        status = self._window.bytes[first : last + PUT_BLOCKS * STATUS_BYTES].view(torch.int64)
        self._wait(numbers, PUT_BLOCKS, self._max_polls, (status, PUT_BLOCKS))
        self._exchange.launch_add_rows(y, self._rows[site][2][: len(y)], frame, ids)

    def close(self) -> None:
        self._group.close()
