# SPDX-License-Identifier: Apache-2.0
"""The `moe-lora` command; subcommands are imported when called."""
