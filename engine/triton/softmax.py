"""The running softmax of the attention kernels, in powers of two: exp2 is one instruction, exp is two.

For each query: ``best``, the highest score so far, ``weight``, the sum of 2**(score - best), and ``total``, the values so
weighted. Online softmax of FlashAttention (Dao et al., 2022), section 3.1.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOTHING = tl.constexpr(-1e30)  # ``best`` of a query that saw no key yet: below every score, but finite: it is subtracted


@triton.jit
def weigh(products, inner, outer, CAPPED: tl.constexpr):
    """Scores in powers of two: ``products * inner``, or ``outer * tanh(products * inner)`` where soft-capped."""
    scores = products * inner
    if CAPPED:
        small = tl.exp2(-2.8853900817779268 * tl.abs(scores))  # e**(-2 |x|): at most 1, where e**(2 x) could overflow
        size = (1.0 - small) / (1.0 + small)
        scores = outer * tl.where(scores < 0, -size, size)
    return scores


@triton.jit
def fold(scores, values, best, weight, total, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """One more tile: ``scores`` [queries, keys], -inf where unseen; ``values`` [keys, columns] in ``DOT``."""
    better = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - better[:, None])
    shrink = tl.exp2(best - better)
    weight = weight * shrink + tl.sum(weights, 1)
    total = tl.dot(weights.to(DOT), values, total * shrink[:, None], input_precision=PRECISION)
    return better, weight, total
