"""Times of layers and of steps on this machine, for provisioning and placement."""
