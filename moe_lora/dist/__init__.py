"""All that makes several processes one system: transports, control messages, LoRA Server, cluster, launch."""
