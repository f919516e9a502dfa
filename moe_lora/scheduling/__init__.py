# SPDX-License-Identifier: Apache-2.0
"""Choice of sequences for a step: one scheduler for the engine and for the simulator.  No torch here."""
