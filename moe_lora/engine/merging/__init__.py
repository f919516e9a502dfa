# SPDX-License-Identifier: Apache-2.0
"""One adapter merged into the weights: decisions and changes of weights."""
