# SPDX-License-Identifier: Apache-2.0
"""What decides for a whole cluster: adapters, placement, capacity; and how front ends hear of it."""
