"""A whole decoder step for CPUs with AVX-512 bf16, compiled by numba: no C compiler, no OpenMP, no copy of K/V.

Everything is laid out for one instruction, ``vdpbf16ps``: 16 lanes, and in each lane ``acc + a[0] * b[0] + a[1] * b[1]`` of two
bf16 pairs, summed in float32. A lane is one output (or one key, or one column of V), and lanes are never summed across. So the
numbers that a lane multiplies, two by two, have to lie side by side; a matrix unit (AMX) reads the same order:

    weights [outputs, inputs], packed once at load             K of 16 keys, transposed into scratch for each use

      outputs ->  0      1      2  ..  15                         keys ->   0      1      2  ..  15
      inputs 0,1  (0,1)  (0,1)  (0,1)  (0,1)   64 bytes           dims 0,1  (0,1)  (0,1)  (0,1)  (0,1)
      inputs 2,3  (2,3)  (2,3)  (2,3)  (2,3)   64 bytes           dims 2,3  (2,3)  (2,3)  (2,3)  (2,3)
      ...         one group of 16 outputs: inputs * 32 bytes      ...       one tile: head_dim * 32 bytes

    V of two tokens, interleaved into scratch                   activations stay as they are, row by row: one pair is
      columns ->  0      1      2  ..  head_dim - 1             broadcast to all lanes by the load itself
      tokens 0,1  (0,1)  (0,1)  (0,1)  (0,1)

K and V themselves stay in the canonical order of pages: what packs them per use costs a few percent of prefill attention,
hides behind memory in decode, and lets pool, wire and other backends know nothing of it.

Bits do not depend on company: every output is summed in one order, whatever else is in the batch. A query meets its keys in
blocks of ``KEY_BLOCK`` from position 0 on, in ranges of ``KEY_RANGE`` that are merged one after another; who computes a range
is free. So greedy output is the same alone, batched, chunked, cached, and on any number of threads.

===========  =====================================================================================================
cpu          what the CPU has to have, and whether it has a matrix unit that may be used
features     what CPU, model and layout have to be like
packing      weights into the order above
lanes        the vocabulary of vector code: loads, pairs, dot, exp2, shuffles
tiles        what runs in registers: a product of 64 outputs by 6 tokens, scores, weighted values
matrix       the same in the matrix unit, 16 rows by 16 outputs in one instruction
vectors      one row of numbers at a time: softmax, norms, rotary embedding, activation, conversions
attention    queries of one K/V head against pages
key_blocks   what a block of keys adds to rows of queries
places       where a thread keeps what attention works on
planning     who attends to what: tasks of one step
crew         native threads that sleep between steps
phases       who does what: units that any thread may take, and take over from one that lost its core
products     tiles of outputs, and what happens to rows of tokens between two products
by_outputs   phases of a layer when tokens are few: they share out the outputs of each product
by_tokens    phases of a layer when tokens are many: they share out the tokens
step         all layers, on every thread of the crew at once
buffers      where the numbers of a step lie
backend      ``engine.backends.Backend``: buffers, hooks, logits
===========  =====================================================================================================
"""
