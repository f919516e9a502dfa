# SPDX-License-Identifier: Apache-2.0
"""What a family's file states: `family.py` first."""
