# SPDX-License-Identifier: Apache-2.0
"""The remote half of the LoRA seam: frames, sessions, and backends that send rows away."""
