# SPDX-License-Identifier: Apache-2.0
"""Choice of sequences for a step, for engine and simulator.  No torch here."""
