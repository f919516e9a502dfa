"""Tables of the pages, made from valid records: name -> module and function, imported when chosen.

python -m bench.pages.table NAME       # print one table
python -m bench.pages.blocks           # check all blocks, as `make results-check` does
python -m bench.pages.blocks --write   # write all blocks anew
"""

TABLES = {
    "adapters-on-a-gpu": "gpu:adapters",
    "adapters-on-cpu": "engine:adapters",
    "decode": "engine:decode",
    "decode-readme": "engine:readme",
    "gpu-adapters": "gpu:adapters_by_popularity",
    "gpu-decode": "gpu:decode",
    "gpu-kernels": "gpu:kernels",
    "gpu-prefill": "gpu:prefill",
    "plans": "plans:plans",
    "plans-qwen": "plans:qwen",
    "simulator": "simulated:nearness",
    "support": "support:matrix",
}
