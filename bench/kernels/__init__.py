# SPDX-License-Identifier: Apache-2.0
"""The kernels beside the papers' baselines and the machine's bounds; the tuner."""
