# SPDX-License-Identifier: Apache-2.0
"""The processes of one instance: what each holds, and how they compute one step together."""
