# SPDX-License-Identifier: Apache-2.0
"""Parts of a family's file: `family.py` first."""
