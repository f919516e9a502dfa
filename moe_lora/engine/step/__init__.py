# SPDX-License-Identifier: Apache-2.0
"""One step: its batch, its launch, its tokens."""
