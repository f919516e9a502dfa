"""Do our greedy tokens equal a reference's?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .engine_runs import Prompts


@torch.inference_mode()
def agreement(
    model: Any, prompts: Prompts, answers: Sequence[Sequence[int]], **model_arguments: Any
) -> dict[str, float]:
    """How far the answers are the reference's own greedy choice after the same prefix (teacher forcing).

    token_agreement: share of answer tokens that are its argmax (1.0 = its greedy continuation, token for
    token).  worst_logit_gap: how far the worst answer token's logit lies below the reference's top one.
    """
    tokens = torch.tensor([[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)])
    length = len(answers[0])
    logits = model(input_ids=tokens[:, :-1], use_cache=False, **model_arguments).logits[:, -length:].float()
    chosen = logits.gather(-1, tokens[:, -length:, None])[..., 0]
    gap = logits.max(-1).values - chosen
    return {
        "num_tokens": float(gap.numel()),
        "token_agreement": (gap == 0).float().mean().item(),
        "worst_logit_gap": gap.max().item(),
    }
