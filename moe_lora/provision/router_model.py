"""Toppings' equation 2 as routers take it: alpha times the work of the adapters, plus beta."""

from __future__ import annotations

from typing import Any

from moe_lora.core.errors import ConfigError
from moe_lora.policies.step_model import StepModel


def router_fields(model: StepModel, prompt_tokens: float) -> dict[str, Any]:
    """{"kernel", "decode": {"alpha_s", "beta_s"}, "prefill": likewise}; work is requests times ranks.

    prompt_tokens: mean length of a prompt, by which alpha of prefill is multiplied, as equation 2 knows no
    tokens; what a prompt takes without adapter is left out, since it is the same on every instance.  A model
    of "sgmv" is given as "mbgmv", whose work is the sum of ranks too.  Raises ConfigError for another form
    than "toppings".
    """
    if model.form != "toppings":
        raise ConfigError(f"form={model.form!r} is not equation 2; give the toppings model")
    name = "padded_ranks" if model.kernel == "bgmv" else "ranks"
    return {
        "kernel": "bgmv" if model.kernel == "bgmv" else "mbgmv",
        "decode": {"alpha_s": model.decode_s[name], "beta_s": model.decode_s["step"]},
        "prefill": {"alpha_s": model.prefill_s[name] * prompt_tokens, "beta_s": model.prefill_s["step"]},
    }
