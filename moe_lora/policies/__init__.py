# SPDX-License-Identifier: Apache-2.0
"""Decisions without effects: pure functions over read-only views; the caller carries them out."""
