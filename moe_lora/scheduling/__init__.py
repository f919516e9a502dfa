# SPDX-License-Identifier: Apache-2.0
"""Choice of a step's sequences, for engine and simulator.  No torch here."""
