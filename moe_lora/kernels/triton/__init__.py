# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for Hopper GPUs; Triton is imported at the first launch."""
