# SPDX-License-Identifier: Apache-2.0
"""Which requests move to which instance."""
