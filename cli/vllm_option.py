# SPDX-License-Identifier: Apache-2.0
"""Rows of the table of vLLM's options (`vllm_options`).

Unsupported changes of answers, access or served models are refused.  Options for speed or logs have no
effect, and the log says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Takes = Literal["flag", "value", "values"]
ANY = "*"
MODEL = "MODEL_DIR"
"""The model's path in `VllmOption.words`."""


class VllmOption(NamedTuple):
    """One option of vLLM.

    takes: a "flag" has a form --no-NAME.  words: value → our words, `{}` for the value, "" for no words;
    `ANY`: every other value.  Further values are refused.  A flag may have words beside "true" and "false".
    text: reason of no effect, or way out of a refusal.  own: the same option here.
    """

    names: tuple[str, ...]
    takes: Takes
    words: Mapping[str, str]
    text: str
    convert: str = ""
    example: str = "1"
    own: bool = False

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def is_unused(self) -> bool:
        """True if no value has an effect."""
        return not self.own and bool(self.words) and not any(self.words.values()) and not self.is_neutral_only

    @property
    def is_neutral_only(self) -> bool:
        """True if only neutral values are accepted."""
        return ANY not in self.words and (self.takes != "flag" or len(self.words) < 2)

    def here(self) -> str:
        """The option's effect in `moe-lora serve`."""
        if self.own and not self.text:
            return "as in vLLM"
        if self.own:
            return f"as in vLLM; {self.text}"
        if self.is_unused:
            return f"no effect: {self.text}"
        if self.takes == "flag" and self.is_neutral_only:
            return f"refused: {self.text}" if "false" in self.words else f"always on: {self.text}"
        ours = "; ".join(
            f"`{shown}`" if value in (ANY, "true") else f"{self._given(value)}: `{shown}`"
            for value, words in self.words.items()
            if words and (shown := _shown(words))
        )
        if ours:
            return f"means {ours}" + (f"; {self.text}" if self.text else "")
        neutral = " or ".join(f"`{self._given(value)}`" for value in self.words)
        return f"only {neutral}; else refused: {self.text}" if neutral else f"refused: {self.text}"

    def _given(self, value: str) -> str:
        if self.takes != "flag":
            return value
        return self.name if value == "true" else f"--no-{self.name[2:]}"


def _shown(words: str) -> str:
    """Our words in help and docs."""
    return MODEL if words == "{}" else words.replace("{}", "VALUE").replace("{tensor}", "RANKS")


def same(
    name: str, text: str = "", *, takes: Takes = "value", convert: str = "", example: str = "1", **words: str
) -> VllmOption:
    """An option that `serve` has too."""
    return VllmOption((name,), takes, words or {ANY: f"{name} {{}}"}, text, convert, example, own=True)


def setting(name: str, place: str, text: str = "", *values: str) -> VllmOption:
    """An option with a setting's effect.  values: all allowed; none: any."""
    words = {value: f"--set {place}={value}" for value in values} or {ANY: f"--set {place}={{}}"}
    return VllmOption((name,), "value", words, text, own=True)


def alias(
    names: str, ours: str, text: str = "", *, convert: str = "", example: str = "1", takes: Takes = "value"
) -> VllmOption:
    return VllmOption(tuple(names.split()), takes, {ANY: ours}, text, convert, example)


def flag(names: str, on: str | None, off: str | None, text: str = "") -> VllmOption:
    """on, off: our words; None: refused."""
    words = {key: words for key, words in (("true", on), ("false", off)) if words is not None}
    return VllmOption(tuple(names.split()), "flag", words, text)


def switch(name: str, place: str, text: str = "") -> VllmOption:
    """A flag of a setting."""
    return flag(name, f"--set {place}=true", f"--set {place}=false", text)


def unused(names: str, why: str, takes: Takes = "value") -> VllmOption:
    """An option without an effect here."""
    words = {"true": "", "false": ""} if takes == "flag" else {ANY: ""}
    return VllmOption(tuple(names.split()), takes, words, why)


def only(names: str, values: tuple[str, ...], way_out: str) -> VllmOption:
    """An option with neutral values alone."""
    return VllmOption(tuple(names.split()), "value", dict.fromkeys(values, ""), way_out)


def off(names: str, way_out: str) -> VllmOption:
    """A flag; on is refused."""
    return flag(names, None, "", way_out)


def refused(names: str, way_out: str) -> VllmOption:
    return VllmOption(tuple(names.split()), "value", {}, way_out)
