# SPDX-License-Identifier: Apache-2.0
"""PEFT's adapter files, matched with a model."""
