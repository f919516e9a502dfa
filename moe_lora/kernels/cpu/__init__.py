# SPDX-License-Identifier: Apache-2.0
"""The CPU library: C++ kernels in csrc/, and their binding."""
