# SPDX-License-Identifier: Apache-2.0
"""What a program of torchrun does on a rank other than 0."""

from moe_lora.engine.ranks.follower import follow_rank_0

if __name__ == "__main__":
    follow_rank_0()
