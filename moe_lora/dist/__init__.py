# SPDX-License-Identifier: Apache-2.0
"""All that makes several processes one system: transports, control messages, LoRA Server, cluster, launch."""
