# SPDX-License-Identifier: Apache-2.0
"""LoRA shrink and expand."""
