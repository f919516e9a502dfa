# SPDX-License-Identifier: Apache-2.0
"""PEFT's adapter files and configs, read and matched with a model."""
