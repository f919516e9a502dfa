# SPDX-License-Identifier: Apache-2.0
"""Adapters: PEFT files, packed form, host store, registry."""
