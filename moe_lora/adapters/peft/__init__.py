# SPDX-License-Identifier: Apache-2.0
"""PEFT's adapter files and configs, matched with a model."""
