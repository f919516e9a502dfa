# SPDX-License-Identifier: Apache-2.0
"""One adapter in the weights: who decides, and how weights change."""
