# SPDX-License-Identifier: Apache-2.0
"""What all benches share: ceilings of the machine, rounds in turn, random models."""
