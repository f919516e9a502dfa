"""Who has how many pages."""

from __future__ import annotations

from .flags import DYING, HAS_DEVICE_PAGES
from .ranking import Ranking
from .windows import blocked_rows


def usage(ranking: Ranking) -> dict[str, int]:
    """See `UnifiedCache.usage`."""
    device, host, columns = ranking.residence.device, ranking.residence.host, ranking.columns
    rows = columns.where(HAS_DEVICE_PAGES)
    rows = rows[~columns.is_adapter[rows]]
    pages, used = columns.pages[rows], blocked_rows(ranking, moving=False)[rows]
    invalid = ~columns.has(columns.adapter_row[rows], HAS_DEVICE_PAGES) & ~columns.has(rows, DYING)
    return {
        "device_kv": device.num_kv,
        "device_adapters": device.num_adapter,
        "device_free": device.num_free,
        "host_kv": host.num_kv,
        "host_adapters": host.num_adapter,
        "host_free": host.num_free,
        "device_kv_used": device.num_kv - int(pages[~used].sum()),
        "device_kv_invalid": int(pages[invalid].sum()),
    }
