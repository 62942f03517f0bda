"""Kernels in C++ for processors with AVX-512 and its bfloat16 products, built once and kept in the cache.

Nothing else needs them: where a compiler, a processor feature or a type is missing, the same results are
computed in plain PyTorch. `load` gives the library or says why there is none; `attention` and its neighbours
call it on tensors.
"""
