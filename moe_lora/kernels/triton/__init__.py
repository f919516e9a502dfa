# SPDX-License-Identifier: Apache-2.0
"""LoRA kernels in Triton for Hopper GPUs; importable without Triton, which is needed at the first launch."""
