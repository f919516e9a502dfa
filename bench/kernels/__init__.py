"""The kernels beside the papers' baselines and the machine's bounds; the tuner."""
