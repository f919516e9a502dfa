# SPDX-License-Identifier: Apache-2.0
"""Commands of the pages, run and compared with the output that stands below them.

python -m bench.pages.sessions PAGE ...           # compare
python -m bench.pages.sessions --write PAGE ...   # write the output that differs

Blocks of a page share a shell, in a new folder with links to `demo` and `bench`.  `...` stands for any text.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

from bench.harness.records import ROOT
from bench.house.language import Session, page_sessions

PORT = "8000"
"""Pages name this port; a run takes a free one."""
LIMIT_S = 800.0
_MARK = "\x1e"


class Difference(NamedTuple):
    """A block, and its output today."""

    session: Session
    found: str

    def __str__(self) -> str:
        commands = "\n".join(f"$ {one}" for one in self.session.commands)
        return f"{self.session.page}\n{commands}\npage:\n{self.session.output}\ntoday:\n{self.found}\n"


def differences(page: Path, folder: Path) -> list[Difference]:
    """Run all blocks of the page in the folder."""
    blocks = page_sessions(page)
    for name in ("demo", "bench"):
        (folder / name).symlink_to(ROOT / name)
    outputs = _outputs(blocks, folder)
    return [Difference(one, text) for one, text in zip(blocks, outputs, strict=True) if not alike(one, text)]


def alike(session: Session, found: str) -> bool:
    """Compare line ends apart; each `...` of the page matches the shortest text that fits."""
    wanted = "\n".join(line.rstrip() for line in session.output.strip().splitlines())
    pattern = ".*?".join(re.escape(part) for part in wanted.split("..."))
    return re.fullmatch(pattern, found, re.DOTALL) is not None


def _outputs(blocks: list[Session], folder: Path) -> list[str]:
    port = _free_port()
    script = folder / "session.sh"
    lines = [
        f"{_placed(command, port)}\n" for one in blocks for command in [*one.commands, f"echo '{_MARK}'"]
    ]
    script.write_text("".join(lines), encoding="utf-8")
    environment = {
        **os.environ,
        "COLUMNS": "80",
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    with (folder / "session.out").open("w+b") as output:
        shell = subprocess.Popen(
            ["bash", script.name],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            shell.wait(LIMIT_S)
        finally:
            _end(shell.pid)
            shell.wait()
        output.seek(0)
        text = output.read().decode("utf-8", "replace").replace(str(port), PORT)
    found = ["\n".join(line.rstrip() for line in part.strip().splitlines()) for part in text.split(_MARK)]
    return found[: len(blocks)] + [""] * (len(blocks) - len(found))


def _placed(command: str, port: int) -> str:
    return re.sub(rf"\b{PORT}\b", str(port), command)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _end(group: int) -> None:
    """End all processes that the shell started."""
    try:
        os.killpg(group, signal.SIGTERM)
    except ProcessLookupError:
        return


def rewritten(text: str, found: list[Difference]) -> str:
    """The page with today's output."""
    for session, today in reversed(found):
        end = text.index("\n```", session.start)
        body = "\n".join(["```console", *(f"$ {one}" for one in session.commands), today])
        text = text[: session.start] + body + text[end:]
    return text


def _checked(pages: tuple[Path, ...]) -> Iterator[tuple[Path, list[Difference]]]:
    for page in pages:
        with tempfile.TemporaryDirectory() as folder:
            yield page, differences(page, Path(folder))


@click.command(help=__doc__, context_settings={"max_content_width": 100})
@click.option("--write", is_flag=True, help="Write the output that differs into the pages.")
@click.argument("pages", nargs=-1, type=click.Path(path_type=Path, exists=True), required=True)
def main(write: bool, pages: tuple[Path, ...]) -> None:
    differs = False
    for page, found in _checked(pages):
        differs = differs or bool(found)
        if write and found:
            page.write_text(rewritten(page.read_text(encoding="utf-8"), found), encoding="utf-8")
        for one in found:
            click.echo(str(one))
    sys.exit(1 if differs and not write else 0)


if __name__ == "__main__":
    main()
