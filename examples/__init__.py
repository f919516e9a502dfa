# SPDX-License-Identifier: Apache-2.0
"""Programs to start from, over the library."""
