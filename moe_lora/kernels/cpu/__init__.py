"""The CPU library: C++ kernels in csrc/, and their binding."""
