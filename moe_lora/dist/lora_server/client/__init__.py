# SPDX-License-Identifier: Apache-2.0
"""An instance's side of the LoRA Server: its backend, leases and links."""
