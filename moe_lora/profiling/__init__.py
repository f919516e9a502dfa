# SPDX-License-Identifier: Apache-2.0
"""Times of layers and of steps on this machine, for provisioning and placement."""
