# SPDX-License-Identifier: Apache-2.0
"""Processes of modules of the product and of its tests, forked from one that has torch loaded.

Importing torch takes a process more than a second, forking takes milliseconds.  What runs is the module that
the command names, with its options, descriptors and environment; parent, session, command line and exit
status are those of a process that was started anew.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import fcntl
import gc
import importlib.util
import io
import os
import pickle
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

from moe_lora.core import processes

_PR_SET_CHILD_SUBREAPER = 36
_COMMAND_LINE = "." * 400
"""Room for the command line of a child, which is written over this process's own."""
_LOADED = (
    "moe_lora.dist.host_workers.worker",
    "moe_lora.engine.ranks.follower",
    "moe_lora.dist.launch.cluster_file",
    "moe_lora.dist.launch.roles",
    "moe_lora.engine.build",
    "moe_lora.engine.loop",
    "moe_lora.assemble",
    "moe_lora.cli.serve",
    "moe_lora.dist.cluster.controller.capacity_controller",
    "moe_lora.dist.cluster.controller.cluster_controller",
    "moe_lora.dist.cluster.listener",
    "moe_lora.serve.openai.endpoints",
    "moe_lora.serve.server",
    "anyio._backends._asyncio",
    "httptools",
    "pydantic.v1",
    "pytest.__main__",
    "transformers.utils.chat_template_utils",
    "uvicorn.lifespan.off",
    "uvicorn.protocols.http.auto",
)
"""Modules of a server, its instances and its workers: a server's imports take two seconds of CPU time."""
_TORCHRUN = "torch.distributed.run"
_TORCHRUN_STARTS = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
"""The module of torchrun that starts a job's ranks."""
_FORKED = ("moe_lora.", "tests.", "anyio.to_process", _TORCHRUN)
_FIRST_HIGH_FD = 512
_START_AWAITED = asyncio.create_subprocess_exec
_LIBC = ctypes.CDLL(None, use_errno=True)


class ForkedChild(subprocess.Popen[bytes]):
    """A child that this process did not start itself."""

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        self.pid, self.args, self.returncode = pid, args, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self._waitpid_lock = threading.Lock()
        self._communication_started, self._input, self.text_mode = False, None, None


class _AwaitedChild:
    """What asyncio shows of a child."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        self.pid, self.send_signal = child.pid, child.send_signal
        self.terminate, self.kill = child.terminate, child.kill

    @property
    def returncode(self) -> int | None:
        return self._child.returncode

    async def wait(self) -> int:
        while (code := self._child.poll()) is None:
            await asyncio.sleep(0.01)
        return code


def _is_forked(args: Sequence[str]) -> bool:
    words = [word for word in args[:4] if word != "-u"]
    return words[:2] == [sys.executable, "-m"] and words[2].startswith(_FORKED)


class Forks:
    """Starts processes by asking the one at the other end of a socket to fork."""

    def __init__(self, asks: socket.socket) -> None:
        self._asks = asks
        self._lock = threading.Lock()

    def start(
        self,
        args: Sequence[str],
        *,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        start_new_session: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Stands in for subprocess.Popen; forks what is a module of the product or of its tests.

        A file may be PIPE.
        """
        if not _is_forked(args):
            return subprocess.Popen(
                args,
                pass_fds=pass_fds,
                env=env,
                cwd=cwd,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=start_new_session,
            )
        env = os.environ if env is None else env
        with ExitStack() as theirs:
            files, ours = _with_pipes((stdin, stdout, stderr), theirs)
            fds = [own if file is None else file.fileno() for own, file in enumerate(files)]
            child = self._forked(args, fds, pass_fds, env, str(cwd or os.getcwd()), start_new_session)
        child.stdin, child.stdout, child.stderr = ours
        return child

    def _forked(
        self,
        args: Sequence[str],
        fds: Sequence[int],
        pass_fds: Sequence[int],
        env: Mapping[str, str],
        folder: str,
        start_new_session: bool,
    ) -> ForkedChild:
        # The fork becomes our child when who forked it ends.
        with self._lock, _orphans_become_ours():
            facts = (list(args), list(pass_fds), dict(env), folder, start_new_session, os.getpid())
            socket.send_fds(self._asks, [pickle.dumps(facts)], [*fds, *pass_fds])
            answer = self._asks.recv(64)
        assert answer, "the process that forks is gone"
        return ForkedChild(int(answer), args)

    async def start_awaited(self, *args: str, **options: Any) -> Any:
        """Stands in for asyncio.create_subprocess_exec; who starts anything else gets that."""
        if not _is_forked(args):
            return await _START_AWAITED(*args, **options)
        return _AwaitedChild(self.start(args, **options))

    def start_piped(self, args: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Stands in for asyncio's subprocess.Popen, for the process of `anyio.to_process`."""
        if not _is_forked(args):
            return subprocess.Popen(args, **options)
        return self.start(args, **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE))


def _with_pipes(files: Sequence[Any], theirs: ExitStack) -> tuple[list[Any], list[io.FileIO | None]]:
    """The child's files, and our ends of pipes; the child's ends close with the stack."""
    given, ours = list(files), list[io.FileIO | None]([None] * len(files))
    for place, file in enumerate(files):
        if file == subprocess.PIPE:
            read, write = os.pipe()
            child, our = (read, write) if place == 0 else (write, read)
            given[place] = theirs.enter_context(io.FileIO(child, "r" if place == 0 else "w"))
            ours[place] = io.FileIO(our, "w" if place == 0 else "r")
    return given, ours


@contextmanager
def _orphans_become_ours() -> Iterator[None]:
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class _FirstStart(Forks):
    """Starts the process that forks when it is first needed."""

    def __init__(self) -> None:
        asks, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(asks)
        self._start_lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, args: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        with self._start_lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(self._theirs.fileno()), _COMMAND_LINE],
                    pass_fds=[self._theirs.fileno()],
                    env=processes.worker_environment(1),
                    start_new_session=True,
                )
                self._theirs.close()
        return super().start(args, **options)

    def close(self) -> None:
        if self._process is not None:
            self._asks.shutdown(socket.SHUT_RDWR)  # closing is not enough where a process has a copy
        self._asks.close()
        if self._process is None:
            self._theirs.close()
        else:
            self._process.wait()


@contextmanager
def children_are_forked() -> Iterator[Forks | None]:
    """What the product starts of its own modules is forked, by children too.  None: not on this system."""
    if sys.platform != "linux":
        yield None
        return
    forks = _FirstStart()
    with _starting_by(forks):
        try:
            yield forks
        finally:
            forks.close()


@contextmanager
def _starting_by(forks: Forks) -> Iterator[None]:
    with (
        mock.patch.object(processes, "subprocess", SimpleNamespace(Popen=forks.start)),
        mock.patch.object(asyncio, "create_subprocess_exec", forks.start_awaited),
        mock.patch.object(asyncio.unix_events, "subprocess", _by_asyncio(forks.start_piped)),
    ):
        yield


@contextmanager
def children_start_anew() -> Iterator[None]:
    """As outside of tests."""
    with (
        mock.patch.object(processes, "subprocess", subprocess),
        mock.patch.object(asyncio, "create_subprocess_exec", _START_AWAITED),
        mock.patch.object(asyncio.unix_events, "subprocess", subprocess),
    ):
        yield


def _by_asyncio(start: Callable[..., subprocess.Popen[bytes]]) -> SimpleNamespace:
    """What asyncio calls of the module `subprocess`."""
    return SimpleNamespace(Popen=start, PIPE=subprocess.PIPE)


def main() -> None:
    """Fork until the other end hangs up."""
    for name in _LOADED:
        importlib.import_module(name)
    importlib.import_module("tests.patient_workers").workers_have_time().__enter__()
    gc.collect()
    gc.freeze()
    _fork_when_asked(socket.socket(fileno=int(sys.argv[1])))


def _fork_when_asked(asks: socket.socket) -> None:
    while True:
        data, fds, *_ = socket.recv_fds(asks, 1 << 17, 64)
        if not data:
            os._exit(0)
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            _become(asks, fds, *pickle.loads(data))
            return
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)


def _become(
    asks: socket.socket,
    fds: Sequence[int],
    args: Sequence[str],
    pass_fds: Sequence[int],
    env: Mapping[str, str],
    folder: str,
    new_session: bool,
    parent: int,
) -> None:
    """Run what was asked for, as the asking process's child."""
    while os.getppid() != parent:
        time.sleep(0.0001)
    if new_session:
        os.setsid()
    own_asks = _own_forks(asks, fds)
    _show_command_line(args)
    asks.send(str(os.getpid()).encode())
    asks.close()
    for ours, wanted in zip(_high(fds), (0, 1, 2, *pass_fds), strict=True):
        os.dup2(ours, wanted)
        os.close(ours)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # found anew, by that environment
    os.chdir(folder)
    _customise(env)

    import torch

    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
    words = [word for word in args if word != "-u"]
    if len(words) < len(args):
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    module, sys.argv = words[2], words[2:]
    sys.modules.pop(module, None)
    forks = Forks(own_asks)
    if module == _TORCHRUN:
        importlib.import_module(_TORCHRUN_STARTS).Popen = forks.start
    with _starting_by(forks):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            _end(ended.code)
    _end(None)


def _end(code: str | int | None) -> NoReturn:
    """End as Python does, but leave memory to the system: half of a server's CPU time would free it."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code or 0)


def _customise(env: Mapping[str, str]) -> None:
    """Import `sitecustomize` of the environment's path, as Python does at its start."""
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    if importlib.util.find_spec("sitecustomize") is not None:
        importlib.import_module("sitecustomize")


def _own_forks(asks: socket.socket, fds: Sequence[int]) -> socket.socket:
    """Socket of a process that forks for this one, from now on: no thread runs yet, and nothing is open."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        for fd in fds:
            os.close(fd)
        asks.close()
        ours.close()
        _fork_when_asked(theirs)
        sys.exit()
    theirs.close()
    return socket.socket(fileno=_high([ours.detach()])[0])


def _high(fds: Sequence[int]) -> list[int]:
    """The same files under numbers that no parent's descriptor has."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_HIGH_FD) for fd in fds]
    for fd in fds:
        os.close(fd)
    return high


def _show_command_line(args: Sequence[str]) -> None:
    """Have /proc show these words as the command of this process."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    words = b"\0".join(word.encode() for word in args)[: end - start - 1]
    ctypes.memmove(start, words.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    main()
