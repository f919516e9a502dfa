# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled for sm_90a without a GPU, and what the compiler made of them."""
