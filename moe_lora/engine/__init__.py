"""Continuous batching over paged KV: scheduler, runner, sampler and the clients that reach them."""
