# SPDX-License-Identifier: Apache-2.0
"""Settings of the file by the options that named them once; such an option is refused with its new place."""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

from moe_lora.config.cluster import SECTIONS
from moe_lora.config.settings import former_settings, settings_of


class Place(NamedTuple):
    """A setting of a section of the file.  reason: why the section has it no more, else empty."""

    section: str
    name: str
    kinds: tuple[Any, ...]
    reason: str = ""

    @property
    def is_list(self) -> bool:
        return any(kind in self.kinds for kind in (tuple[str, ...], tuple[int, ...]))

    def words(self, values: Sequence[str]) -> str:
        """The option --set with these values, as a shell reads it."""
        text = values[-1]
        if self.is_list:
            numbers = tuple[int, ...] in self.kinds
            text = f"[{', '.join(values)}]" if numbers else json.dumps(list(values), ensure_ascii=False)
        return f"--set {shlex.quote(f'{self.section}.{self.name}={text}')}"


@functools.cache
def former_options() -> dict[str, list[Place]]:
    """Name with dashes → places, for every setting without an option, and every former setting."""
    found: dict[str, list[Place]] = {}
    for section, kind in SECTIONS.items():
        for name, one in settings_of(kind).items():
            if one.rule.in_file and not one.rule.option:
                dashed = name.replace("_", "-")
                names = {f"--{dashed}", one.rule.former or f"--{dashed}"}
                for option in names | ({f"--no-{dashed}"} if bool in one.kinds else set()):
                    found.setdefault(option, []).append(Place(section, name, one.kinds))
    for section, kind in SECTIONS.items():
        for name, reason in former_settings(kind).items():
            found.setdefault("--" + name.replace("_", "-"), [Place(section, name, (), reason)])
    return found


def new_place(option: str, values: Sequence[str]) -> str:
    """Where the setting of an option stands now.  values: those given with the option."""
    places = former_options()[option]
    if places[0].reason:
        return f"{option} is no setting any more: {places[0].reason}"
    if bool in places[0].kinds:
        values = values or ["false" if option.startswith("--no-") else "true"]
    shown = " or ".join(place.words(values or ["VALUE"]) for place in places)
    return f"{option} is a setting of the file now: {shown}"
