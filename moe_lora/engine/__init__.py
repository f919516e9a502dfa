"""Continuous batching over paged KV: residency, runner, sampler and the clients that reach them."""
