"""How XLA's compilers are told to compile in tests."""

import platform

import jax

# Machine code for programs that run for a millisecond is not worth LLVM's time, nor is making it
# in 32 pieces, nor another compiler in front of LLVM: three quarters of the time that compiling
# takes.  All that decides over recomputation and memory comes before it; tests that ask what
# holds as users compile, too, have `menagerie.jit_as_users`, or processes of their own.
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):  # later ones have no such choice
    QUICK += " --xla_cpu_use_fusion_emitters=false"
# A processor of x86 is held back to the instruction sets that have no fused
# multiply-add, and matrix products to code of the compiler's own: see
# `menagerie.EXACT`.
FLAGS = QUICK
if platform.machine().lower() in ("x86_64", "amd64"):
    FLAGS += " --xla_cpu_max_isa=AVX --xla_cpu_multi_thread_eigen=false"

# Options of compilers for absent GPUs: products by NVIDIA's library rather than by code that is
# made for each of them, half of the time of compiling.  For tests of what holds under any options.
QUICK_GPU = {"xla_gpu_enable_triton_gemm": False}


def quick(target: str) -> dict[str, bool]:
    """Compiler options for a target, by its name."""
    return {} if target == "local" or target.startswith("v") else QUICK_GPU
