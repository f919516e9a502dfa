# SPDX-License-Identifier: Apache-2.0
"""When an adapter is merged into the weights."""
