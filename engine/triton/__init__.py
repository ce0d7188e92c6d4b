"""Attention over paged K/V on GPUs, by Triton's kernels. Everywhere else they run interpreted (TRITON_INTERPRET=1): slowly, for
tests.

============  =====================================================================================================
rows          where K/V lie in pages, and the only places that read and write them
quantising    rows in eight bits, inside kernels
softmax       the running softmax, in powers of two
attending     attention: queries of one K/V head that share what they read, keys split among programs; merging of splits
writing       fresh K/V into pages
packing       layer slices between pages and canonical bytes
tiling        how big tiles are and why; what is measured
plans         what the kernels know of one step: made once on the host, sent once, read by all layers
calls         the kernels as functions over an engine's pages
step          what modules and recipes call in every layer
answers       steps of answers alone over buffers that stay; CUDA graphs of them
backend       ``engine.backends.Backend``: which steps go which way
making        from a model to that backend; measuring and capturing before it serves
interpreting  whether kernels are interpreted, and one at a time then
============  =====================================================================================================
"""
