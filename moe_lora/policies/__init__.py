# SPDX-License-Identifier: Apache-2.0
"""Pure decisions over read-only views."""
