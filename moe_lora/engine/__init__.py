"""One instance: continuous batching over paged KV, its adapters, ranks, and the clients that reach it."""
