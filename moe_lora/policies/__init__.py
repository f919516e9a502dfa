# SPDX-License-Identifier: Apache-2.0
"""Pure decisions over read-only views; the caller carries them out."""
