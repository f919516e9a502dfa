# SPDX-License-Identifier: Apache-2.0
"""Adapters of the Hugging Face Hub: `hf://org/name[@revision][/folder]`."""

from __future__ import annotations

import hashlib
import logging
import re
from pathlib import Path

from moe_lora.core.errors import AdapterError

from . import check_files, former, mark_used, remove_unused, unreachable

logger = logging.getLogger(__name__)

_ADDRESS = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<folder>.+))?")


def fetch(address: str, cache: Path, max_bytes: int) -> Path:
    """The folder of an adapter's files at one commit, below `cache`; removes an address's `former` commits.

    Later calls transfer changed files only.  The token is the hub library's (HF_TOKEN).  Raises AdapterError,
    PeerUnreachableError.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise AdapterError(f"{address!r} is no address; give hf://ORG/NAME, with @REVISION or /FOLDER behind")
    repo, revision = found["repo"], found["revision"]
    prefix = f"{found['folder'].rstrip('/')}/" if found["folder"] else ""
    place = cache / "hub" / hashlib.sha256(address.encode()).hexdigest()
    is_new = not place.exists()
    mark_used(place)
    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
        sizes = {
            one.rfilename.removeprefix(prefix): one.size
            for one in info.siblings or ()
            if one.rfilename.startswith(prefix)
        }
        names = check_files(address, sizes, max_bytes)
        for name in names:
            got = hf_hub_download(repo, prefix + name, revision=info.sha, cache_dir=place)
        _remove_former(place, Path(got).parents[prefix.count("/")])
        if is_new:
            remove_unused(cache, max_bytes)
        return Path(got).parent
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise AdapterError(
            f"{address} is not on the hub, or needs a token: set HF_TOKEN where the server starts"
        ) from error
    except HFValidationError as error:
        raise AdapterError(f"{address}: {error}") from error
    except AdapterError:
        raise
    except Exception as error:  # the hub library's HTTP clients have no common base
        raise unreachable(address, error) from error


def _remove_former(place: Path, snapshot: Path) -> None:
    """Remove the `former` commits of an address's cache.  snapshot: of the fetched commit."""
    from huggingface_hub import scan_cache_dir

    try:
        if commits := [one.name for one in former(snapshot, snapshot.parent.iterdir())]:
            scan_cache_dir(place).delete_revisions(*commits).execute()
    except OSError as error:  # another server may remove the same commits
        logger.warning("former commits stay in %s: %s", place, error)
