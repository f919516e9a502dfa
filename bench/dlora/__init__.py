# SPDX-License-Identifier: Apache-2.0
"""dLoRA's claims: merged against unmerged by skewness, and replicas that move requests."""
