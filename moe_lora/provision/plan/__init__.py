"""From a load and two SLOs to GPUs, a layout and instances."""
