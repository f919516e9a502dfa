# SPDX-License-Identifier: Apache-2.0
"""Publication of adapters from trainers of other projects to a running server."""
