# SPDX-License-Identifier: Apache-2.0
"""Sends a PEFT model's adapter to a running server, as a name's next version."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import httpx
from safetensors.torch import save, save_file

from moe_lora.adapters.peft.reader import check_dense
from moe_lora.core.errors import AdapterError
from moe_lora.report.load_client import base_url

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor

Found = TypeVar("Found")
TIMEOUT_S = 1800.0
"""Limit of a publication: a load may wait for running requests."""
_MOST_HEADER_BYTES = 32 << 10
"""A longer configuration goes into a body: servers and proxies bound headers."""


def adapter_tensors(model: PeftModel, adapter: str = "default") -> dict[str, Tensor]:
    """The adapter's tensors by adapter_model.safetensors' keys, in host memory.

    Gathers sharded tensors, so every rank must call.
    """
    from peft import get_peft_model_state_dict

    found = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    return whole_tensors(found.items())


def whole_tensors(tensors: Iterable[tuple[str, Any]]) -> dict[str, Tensor]:
    """Tensors in host memory, without shared memory; gathers sharded tensors.  Raises AdapterError."""
    found, storages = dict[str, Any](), set[int]()
    for key, one in tensors:
        whole = (one.full_tensor() if hasattr(one, "full_tensor") else one).detach()
        check_dense(key, whole)
        whole = whole.cpu().contiguous()
        storage = whole.untyped_storage().data_ptr()
        found[key] = whole.clone() if storage in storages else whole
        storages.add(storage)
    return found


def adapter_config(model: PeftModel, adapter: str = "default") -> dict[str, Any]:
    """The content of adapter_config.json."""
    found: dict[str, Any] = {**model.peft_config[adapter].to_dict(), "inference_mode": True}
    return found


class NoAnswerError(AdapterError):
    """The server is away or failed: a later call may succeed."""


class BusyServerError(NoAnswerError):
    """The server can't serve the version yet, as while requests hold a pinned adapter's slot.

    retry_s: the server's Retry-After.
    """

    def __init__(self, message: str, retry_s: int) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class Publisher:
    """Publishes versions of one name.

    api_key: of an administrator.  shared: a folder of shared memory on the server's host, as /dev/shm, where
    every user of the host may read a version under publication; None: tensors go over HTTP.
    """

    def __init__(
        self, url: str, name: str, api_key: str | None = None, shared: str | Path | None = None
    ) -> None:
        self.name = name
        self._shared = shared
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.Client(base_url=base_url(url), headers=headers, timeout=TIMEOUT_S)

    def check_server(self) -> None:
        """Raises AdapterError unless a server answers."""
        self._call("GET", "/version", lambda found: found["version"])

    def publish(self, tensors: dict[str, Tensor], config: dict[str, Any]) -> int:
        """Serve the tensors at all instances; returns the new version.  Running requests end on the former.

        Raises AdapterError with the server's reason, and without an answer.
        """
        text, tensors = json.dumps(config, default=plain), whole_tensors(tensors.items())
        if self._shared is not None:
            return self._publish_shared(tensors, text, self._shared)
        if len(text) > _MOST_HEADER_BYTES:
            file = b64encode(save(tensors)).decode()
            body = {"lora_name": self.name, "config_dict": json.loads(text), "serialized_tensors": file}
            return self._load("/load_lora_adapter_from_tensors", body)
        path, headers = f"/v1/adapters/{quote(self.name, safe='')}", {"X-Adapter-Config": text}
        content = {"content": save(tensors), "headers": headers}
        name, version = self._call("PUT", path, lambda card: (card["id"], int(card["version"])), **content)
        if name != self.name:
            raise AdapterError(f"the server took {self.name!r} for {name!r}; choose a plain name")
        return version

    def _publish_shared(self, tensors: dict[str, Tensor], config: str, shared: str | Path) -> int:
        """The server, maybe of another user, copies the files before its checks."""
        with TemporaryDirectory(dir=shared, prefix="moe_lora-published-") as folder:
            Path(folder, "adapter_config.json").write_text(config, encoding="utf-8")
            save_file(tensors, Path(folder, "adapter_model.safetensors"))
            for file in Path(folder).iterdir():
                file.chmod(0o644)
            Path(folder).chmod(0o755)
            return self._load("/load_lora_adapter", {"lora_name": self.name, "lora_path": folder})

    def _load(self, path: str, body: dict[str, Any]) -> int:
        """The new version by a call whose answer lacks it."""
        self._call("POST", path, json=body)
        return self._call("GET", "/get_weight_version", lambda found: int(found["adapters"][self.name]))

    def remove(self) -> None:
        """Unload the name.  Raises AdapterError with the server's reason."""
        self._call("POST", "/unload_lora_adapter", json={"lora_name": self.name})

    def close(self) -> None:
        self._http.close()

    def _call(
        self, method: str, path: str, read: Callable[[Any], Found] = lambda found: found, **content: Any
    ) -> Found:
        try:
            answer = self._http.request(method, path, **content)
        except httpx.HTTPError as error:
            reason = f"{type(error).__name__}: {error}"
            raise NoAnswerError(
                f"no answer about {self.name!r} from {self._http.base_url}: {reason}"
            ) from error
        kind = None
        try:
            found = answer.json()
            if answer.is_success:
                return read(found)
            reason, kind = found["error"]["message"], found["error"].get("type")
        except (ValueError, KeyError, TypeError):
            reason = f"status {answer.status_code}: {answer.text[:300]}"
        message = f"the server at {self._http.base_url} did not accept {self.name!r}: {reason}"
        retry_s = answer.headers.get("retry-after", "")
        if kind == "ServiceUnavailableError" and retry_s.isdecimal():  # a proxy's 503 has another body
            raise BusyServerError(message, int(retry_s))
        raise (NoAnswerError if answer.is_server_error else AdapterError)(message)


def plain(value: Any) -> Any:
    """Sets and enumerations of a PEFT configuration in their JSON form."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return value.value if isinstance(value, Enum) else str(value)
