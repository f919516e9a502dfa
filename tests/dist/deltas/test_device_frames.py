# SPDX-License-Identifier: Apache-2.0
"""Places in the window that devices put to."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.core.partition import Layout, Partition
from moe_lora.dist.deltas.device_frames import DeviceFrames
from moe_lora.dist.transport.device_puts import PUT_BLOCKS, STATUS_BYTES
from tests.dist.lora_server.shapes import model_shape


@given(
    num_experts=st.sampled_from((0, 8)),
    layout=st.sampled_from(("EP1-PP1", "EP2-PP1", "EP1-PP2", "EP2-PP2")),
    sites=st.sampled_from(("all", "auto")),
    max_rows=st.integers(1, 70),
    num_clients=st.integers(1, 4),
)
def test_no_two_places_overlap_and_no_two_share_a_signal(num_experts, layout, sites, max_rows, num_clients):
    shape = model_shape(num_experts)
    partition = Partition(shape, Layout.parse(layout), 1, sites=sites)
    frames = DeviceFrames(shape, partition, torch.bfloat16, max_rows, num_clients)
    places, signals = [], []
    for client in range(num_clients):
        places.append((frames.frame_at(client), frames.frame_bytes))
        signals.append(frames.asked(client))
        for number in frames.sites:
            site = shape.sites[number]
            signals.append(frames.asked(client, number))
            places.append((frames.x_at(client, number), 2 * frames.inputs(number) * site.in_features))
            if site.num_experts:
                places.append((frames.ids_at(client, number), 4 * frames.outputs(number)))
            answer_bytes = 2 * frames.outputs(number) * site.total_out_features
            places.append((frames.answer_at(client, number), answer_bytes))
            for rank in range(frames.num_ranks):
                places.append((frames.status_at(client, rank, number), PUT_BLOCKS * STATUS_BYTES))
    for number in frames.sites:
        signals += [frames.answered(rank, number) for rank in range(frames.num_ranks)]
    end = 0
    for start, size in sorted(places):
        assert start >= end
        assert start % 16 == 0
        end = start + size
    assert end <= frames.num_bytes
    assert sorted(signals) == list(range(frames.num_signals))
