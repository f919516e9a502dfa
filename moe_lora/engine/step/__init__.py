# SPDX-License-Identifier: Apache-2.0
"""A step: batch, launch, tokens."""
