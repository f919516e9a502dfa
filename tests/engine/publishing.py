# SPDX-License-Identifier: Apache-2.0
"""Publications at exact places of running answers: between two steps, in the engine's thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from moe_lora.core.request import TokenOutput
from moe_lora.engine.core import EngineCore
from tests.oracle import greedy_reference


@contextmanager
def published_at(core: EngineCore, name: str, places: Mapping[int, Path | str]) -> Iterator[None]:
    """Publish a folder as `name` once each of its running requests has so many tokens."""
    left, step = dict(places), core.step

    def publishing() -> list[TokenOutput]:
        running = [one for one in core.sequences.values() if one.request.adapter == name]
        if left and running and min(one.num_generated for one in running) >= min(left):
            path = str(left.pop(min(left)))
            gained = core.catch_up()  # as the loop does before each command
            core.add_adapter(core.read_adapter(name, path), path, replace=True)
            return gained + step()
        return step()

    with patch.object(core, "step", publishing):
        yield
    assert not left, "the answer ended before the publication"


def check_greedy(
    model: Path | str,
    folders: Mapping[int, Path | str],
    prompt: tuple[int, ...],
    runs: list[tuple[int, tuple[int, ...]]],
) -> None:
    """Each run of (version, tokens) is the greedy continuation of prompt and answer before it, in fp32."""
    before = prompt
    for version, tokens in runs:
        expected = greedy_reference(model, folders[version], [before], len(tokens), drafts=[tokens])
        assert tokens == expected.tokens[0], f"tokens of version {version}"
        before += tokens


def runs_of(outputs: list[TokenOutput]) -> list[tuple[int, tuple[int, ...]]]:
    """(version, tokens) of an answer, in order."""
    found: list[tuple[int, tuple[int, ...]]] = []
    for output in outputs:
        version = output.adapter_version
        assert version is not None
        before = found.pop()[1] if found and found[-1][0] == version else ()
        found.append((version, before + output.token_ids))
    return [(version, tokens) for version, tokens in found if tokens]
