# SPDX-License-Identifier: Apache-2.0
"""From a load and two SLOs to GPUs, a layout and instances."""
