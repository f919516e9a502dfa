# SPDX-License-Identifier: Apache-2.0
"""Versions of an answer's tokens (`on_publish="switch"`)."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from moe_lora.core.request import add_run
from moe_lora.serve.http_errors import bad_request

if TYPE_CHECKING:
    from collections.abc import Callable

    from moe_lora.core.request import TokenOutput
    from moe_lora.engine.text.text import TextStream

    from .endpoints import ChoiceFormat
    from .generation import Delta, Generation


def with_versions(make: Callable[..., Generation], form: ChoiceFormat, **given: Any) -> Generation:
    """A generation with a version in each delta, and all versions at the end.

    Raises ApiError for the base model, and for a weighted sum.
    """
    if given["adapter"] is None:
        what = "on_publish=switch needs an adapter in model: the base model has no versions"
        raise bad_request(f"{what}; leave on_publish out", "on_publish")
    if given["source"] is not None:
        what = "on_publish=switch is not supported with lora: a weighted sum keeps the versions of its terms"
        raise bad_request(f"{what}; leave on_publish out", "on_publish")
    generation = make(**given)
    plain = generation._delta
    runs: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)

    def delta(index: int, output: TokenOutput, text: TextStream | None) -> Delta:
        found, version = plain(index, output, text), output.adapter_version
        found.adapter_version = version
        if version is not None:
            add_run(runs[index], version, len(found.token_ids))
        return found

    generation._delta = delta  # type: ignore[method-assign]
    form.show_at_end(
        "adapter_versions",
        lambda index: [{"version": version, "num_tokens": num} for version, num in runs[index]],
    )
    return generation
