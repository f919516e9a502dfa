# SPDX-License-Identifier: Apache-2.0
"""Tables of the pages, made from valid records: name -> module and function, imported when chosen.

python -m bench.pages.table NAME       # print one table
python -m bench.pages.blocks           # check the blocks, as `make results-check` does
python -m bench.pages.blocks --write   # write the blocks anew
"""

TABLES = {
    "adapters-on-a-gpu": "gpu:adapters",
    "adapters-on-cpu": "engine:adapters",
    "cache-cells": "cache:cells",
    "cache-larger": "cache:larger",
    "cache-means": "cache:means",
    "cache-measured": "cache:measured",
    "cache-measured-means": "cache:measured_means",
    "cache-rates": "cache:rates",
    "cache-thresholds": "cache:thresholds",
    "claims": "claims:claims",
    "cluster": "serving:cluster",
    "decode": "engine:decode",
    "decode-readme": "engine:readme",
    "dlora-batching": "dlora:batching",
    "dlora-replicas": "dlora:queueing",
    "dlora-worth": "dlora:worth",
    "dlora-worth-less": "dlora:worth_of_less",
    "estimator": "estimator:errors",
    "gpu-adapters": "gpu:adapters_by_popularity",
    "gpu-decode": "gpu:decode",
    "gpu-kernels": "gpu:kernels",
    "gpu-prefill": "gpu:prefill",
    "gpu-serving": "gpu:serving",
    "http-fields": "http_fields:served",
    "performance-mixing": "performance:mixing",
    "performance-points": "performance:points",
    "performance-quality": "performance:quality",
    "placement-clusters": "placement:clusters",
    "placement-forecasts": "placement:forecasts",
    "placement-production": "placement:production",
    "placement-routers": "placement:routers",
    "placement-shifting": "placement:shifting",
    "plan-check": "plans:checked",
    "plans": "plans:plans",
    "plans-qwen": "plans:qwen",
    "prefill-first": "serving:prefill_first",
    "quantised-amx": "quantised:with_amx",
    "quantised-isa": "quantised:by_isa",
    "restarts": "serving:restarts",
    "server-overlap": "server:overlap",
    "server-rates": "server:rates",
    "simulator": "simulated:nearness",
    "support": "support:matrix",
    "two-kills": "serving:two_kills",
}
