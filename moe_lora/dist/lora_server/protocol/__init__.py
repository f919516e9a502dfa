# SPDX-License-Identifier: Apache-2.0
"""What instances and the LoRA Server agree on: partition, frames, sessions, control messages."""
