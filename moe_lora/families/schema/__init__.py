# SPDX-License-Identifier: Apache-2.0
"""Parts of a family's file; begin with `family.py`."""
