# SPDX-License-Identifier: Apache-2.0
"""Several processes as one system: transports, control messages, LoRA Server, cluster, launch."""
