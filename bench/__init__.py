# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: each writes JSON lines {config, result, env} and is described in README.md."""
