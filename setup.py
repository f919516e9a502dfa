# SPDX-License-Identifier: Apache-2.0
"""Builds the C++ libraries, which ctypes loads. The rest is in setup.cfg.

Two are plain C++. The third has torch's headers and serves the torch that it was built beside. Where there is
none (an isolated build), or it can't be built, its operations run in Python.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from types import MethodType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    import torch.version
    from torch.utils import cpp_extension
except (ImportError, OSError):
    cpp_extension = None

KERNELS = "moe_lora/kernels/cpu/csrc"
OPERATIONS = f"{KERNELS}/operations.cpp"
TRANSPORT = "moe_lora/dist/transport/csrc"
FLAGS = ["-O3", "-g0", "-std=c++17", "-fvisibility=hidden"]

extensions = [
    Extension(
        "moe_lora.kernels.cpu._cpu",
        sources=sorted(set(glob(f"{KERNELS}/*.cpp")) - {OPERATIONS}),
        depends=sorted(glob(f"{KERNELS}/*.h") + glob(f"{KERNELS}/*.inl")),
        # No contraction: a delta is rounded before it is added (see sums.inl).
        extra_compile_args=[*FLAGS, "-fopenmp", "-fno-math-errno", "-ffp-contract=off"],
        extra_link_args=["-fopenmp"],
        language="c++",
    )
]
if cpp_extension is not None:
    extensions.append(
        Extension(
            "moe_lora.kernels.cpu._operations",
            sources=[OPERATIONS],
            depends=[f"{KERNELS}/kernels.h", torch.version.__file__],
            define_macros=[("MOE_LORA_TORCH_VERSION", f'"{torch.__version__}"')],
            include_dirs=cpp_extension.include_paths(),
            library_dirs=cpp_extension.library_paths(),
            libraries=["c10", "torch_cpu"],
            extra_compile_args=["-O2", "-g0", "-std=c++20", "-fvisibility=hidden"],
            language="c++",
            optional=True,
        )
    )
if sys.platform == "linux":  # futexes and memfds
    extensions.append(
        Extension(
            "moe_lora.dist.transport._shm",
            sources=sorted(glob(f"{TRANSPORT}/*.cpp")),
            extra_compile_args=FLAGS,
            language="c++",
        )
    )


class ParallelBuild(build_ext):
    """Compiles the files of all libraries, one on each processor at a time."""

    def build_extensions(self):
        compile_files = type(self.compiler).compile
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

        def compile_each(compiler, sources, *args, **options):
            def compile_one(source):
                return compile_files(compiler, [source], *args, **options)

            return [name for names in pool.map(compile_one, sources) for name in names]

        self.compiler.compile = MethodType(compile_each, self.compiler)
        with ThreadPoolExecutor(processors) as pool:
            super().build_extensions()


setup(ext_modules=extensions, cmdclass={"build_ext": ParallelBuild})
