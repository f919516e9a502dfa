# SPDX-License-Identifier: Apache-2.0
"""Hostile clients against one front end, beside ordinary ones."""
