"""Builds the two C++ libraries: plain C++, no torch headers, loaded by ctypes. The rest is in setup.cfg."""

import sys
from glob import glob

from setuptools import Extension, setup

KERNELS = "moe_lora/kernels/cpu/csrc"
TRANSPORT = "moe_lora/dist/transport/csrc"
FLAGS = ["-O3", "-g0", "-std=c++17", "-fvisibility=hidden"]

extensions = [
    Extension(
        "moe_lora.kernels.cpu._cpu",
        sources=sorted(glob(f"{KERNELS}/*.cpp")),
        depends=sorted(glob(f"{KERNELS}/*.h") + glob(f"{KERNELS}/*.inl")),
        # No contraction: a delta is rounded before it is added (see sums.inl).
        extra_compile_args=[*FLAGS, "-fopenmp", "-fno-math-errno", "-ffp-contract=off"],
        extra_link_args=["-fopenmp"],
        language="c++",
    )
]
if sys.platform == "linux":  # futexes and memfds
    extensions.append(
        Extension(
            "moe_lora.dist.transport._shm",
            sources=sorted(glob(f"{TRANSPORT}/*.cpp")),
            extra_compile_args=FLAGS,
            language="c++",
        )
    )

setup(ext_modules=extensions)
