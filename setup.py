"""Builds the CPU kernels: plain C++ without torch headers, loaded with ctypes. All else is in setup.cfg."""

from glob import glob

from setuptools import Extension, setup

CSRC = "moe_lora/kernels/csrc"

setup(
    ext_modules=[
        Extension(
            "moe_lora.kernels._cpu",
            sources=sorted(glob(f"{CSRC}/*.cpp")),
            depends=sorted(glob(f"{CSRC}/*.h") + glob(f"{CSRC}/*.inl")),
            extra_compile_args=[
                "-O3",
                "-g0",
                "-std=c++17",
                "-fopenmp",
                "-fno-math-errno",
                "-ffp-contract=off",  # a delta is rounded before it is added: see sums.inl
                "-fvisibility=hidden",
            ],
            extra_link_args=["-fopenmp"],
            language="c++",
        )
    ]
)
