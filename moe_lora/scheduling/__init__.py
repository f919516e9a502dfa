# SPDX-License-Identifier: Apache-2.0
"""Which sequences compute in a step: one scheduler for the engine and for the simulator.  No torch here."""
