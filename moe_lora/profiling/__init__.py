# SPDX-License-Identifier: Apache-2.0
"""Times of layers and steps, for provisioning and placement."""
