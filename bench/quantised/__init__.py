# SPDX-License-Identifier: Apache-2.0
"""A quantised base beside a bf16 one."""
