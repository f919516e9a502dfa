# SPDX-License-Identifier: Apache-2.0
"""The `moe-lora` command. Each command has its own file, imported when it is called."""
