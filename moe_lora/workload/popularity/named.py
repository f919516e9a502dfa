"""Popularity by name: what `--popularity` takes, in every command that has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from .functions import functions_popularity
from .mapping import mapped_popularity
from .popularity import AdapterChoice, Popularity, read_counts, uniform, zipf
from .rank_shapes import exponential_ranks, power_ranks, production_ranks, shifting_ranks, uniform_ranks
from .shapes import Distinct, dirichlet, gaussian, long_tail, two_level
from moe_lora.workload.statistics import trace_statistics

USUAL_ZIPF = 1.2  # InfiniLoRA section 6.1

# name: (what follows it, type of each argument, least number of arguments, shape)
_Shape = tuple[str, tuple[type, ...], int, Callable[..., AdapterChoice]]
_SHAPES: dict[str, _Shape] = {
    "uniform": ("", (), 0, uniform),
    "zipf": ("[:S]", (float,), 0, lambda adapters, s=USUAL_ZIPF: zipf(adapters, s)),
    "distinct": ("", (), 0, lambda adapters: Distinct(tuple(adapters))),
    "gaussian": (":SIGMA", (float,), 1, gaussian),
    "long-tail": ("[:NUM_HEAD,SHARE]", (int, float), 0, long_tail),
    "two-level": (":NUM_HOT,SHARE", (int, float), 2, two_level),
    "dirichlet": (":CONCENTRATION[,SEED]", (float, int), 1, dirichlet),
    "loraserve:uniform": ("", (), 0, uniform_ranks),
    "loraserve:exponential": ("[:DECAY]", (float,), 0, exponential_ranks),
    "loraserve:shifting": ("", (), 0, shifting_ranks),
    "loraserve:power": ("[:ALPHA]", (float,), 0, power_ranks),
    "loraserve:production": ("[:SHARE,SHARE,SHARE,SHARE,SHARE]", (float,) * 5, 0, production_ranks),
}
POPULARITY_NAMES = (
    *(name + rest for name, (rest, *_) in _SHAPES.items()),
    "functions[:SKEWNESS]:FILE",
    "trace[:SKEWNESS]:FILE",
    "FILE",
)


def parse_popularity(text: str, adapters: Sequence[str] = ()) -> AdapterChoice:
    """The popularity that `text` names (`POPULARITY_NAMES`), over `adapters`.

    FILE holds counts and names the adapters itself (`read_counts`), so none may be given.  trace:FILE names
    them too; where `adapters` are given, its names are mapped to them, as functions of an Azure Functions
    trace always are (`map_identities`).
    Raises ValueError, listing what is known, for an unknown name or arguments that do not fit.
    """
    name, arguments = _split(text)
    if name in _SHAPES:
        _need_adapters(text, adapters)
        return _shape(text, name, arguments, adapters)
    if name in ("functions", "trace"):
        skewness, colon, path = arguments.partition(":")
        if not (colon and skewness.isdecimal()):
            skewness, path = "1", arguments
        return _of_identities(text, name, path, adapters, int(skewness))
    if not Path(text).is_file():
        raise ValueError(
            f"popularity {text!r} is neither a file nor known; choose one of {', '.join(POPULARITY_NAMES)}"
        )
    if adapters:
        raise ValueError(f"popularity {text}: the file names the adapters itself; name none beside it")
    return read_counts(text)


def _split(text: str) -> tuple[str, str]:
    """Name and what follows its colon; the name may have a colon in it (`loraserve:power`)."""
    known = [name for name in (*_SHAPES, "functions", "trace") if text == name or text.startswith(f"{name}:")]
    name = max(known, key=len, default="")
    return name, text[len(name) + 1 :]


def _need_adapters(text: str, adapters: Sequence[str]) -> None:
    if not adapters:
        raise ValueError(f"popularity {text}: no adapter to choose from; name them, or how many there are")


def _shape(text: str, name: str, arguments: str, adapters: Sequence[str]) -> AdapterChoice:
    rest, types, least, shape = _SHAPES[name]
    values = arguments.split(",") if arguments else []
    if not least <= len(values) <= len(types):
        raise ValueError(f"popularity {text!r}: {len(values)} arguments; write {name}{rest}")
    try:
        parsed = [kind(value) for kind, value in zip(types, values, strict=False)]
    except ValueError:
        raise ValueError(f"popularity {text!r}: {arguments!r} are no numbers; write {name}{rest}") from None
    return shape(adapters, *parsed)


def _of_identities(text: str, name: str, path: str, adapters: Sequence[str], skewness: int) -> Popularity:
    if name == "functions":
        _need_adapters(text, adapters)
        return functions_popularity(path, adapters, skewness)
    found = trace_statistics(path)
    popularity = found.popularity()
    if popularity is None:
        raise ValueError(f"popularity {text}: the trace names no adapter; choose another popularity")
    return mapped_popularity(found.adapter_counts, adapters, skewness) if adapters else popularity
