# SPDX-License-Identifier: Apache-2.0
"""Remote LoRA deltas: frames, sessions, and backends."""
