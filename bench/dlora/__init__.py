"""dLoRA's claims: merged against unmerged by skewness, and replicas that move requests."""
