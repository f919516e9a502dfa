"""What processes of one host are started with, in a file without a name that they inherit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile

from moe_lora.config import EngineConfig
from moe_lora.core.address import Address
from moe_lora.dist.net.codec import Message, decoder_of, encode

THREADS_PER_RANK = 1


class StartInstance(Message, frozen=True):
    """An instance, which dials in at the socket of the only front end of its host.  directory: of the socket,
    deleted if the front end is killed.
    """

    config: EngineConfig
    address: Address
    directory: str


class StartRank(Message, frozen=True):
    """A rank of the LoRA Server.  config: of the instances; it names the server.  directory: of the server,
    deleted with it.
    """

    config: EngineConfig
    server_rank: int
    directory: str | None = None


_DECODE = decoder_of([StartInstance, StartRank])


@contextmanager
def start_file(start: StartInstance | StartRank) -> Iterator[int]:
    """A descriptor from which `read_start` reads it, any number of times."""
    with TemporaryFile() as file:
        file.write(encode(start))
        file.flush()
        yield file.fileno()


def read_start(descriptor: int) -> StartInstance | StartRank:
    found = _DECODE(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    assert isinstance(found, StartInstance | StartRank)
    return found
