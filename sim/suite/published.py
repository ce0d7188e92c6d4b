"""Figures published for the paper's cluster, and costs fitted to them (Qin et al., "Mooncake: Trading More Storage for Less
Computation", FAST 2025): LLaMA-3-70B on nodes of 8 x A800, tensor parallel over all eight."""

from __future__ import annotations

KV_BYTES_PER_TOKEN = 327_680
BLOCK_TOKENS = 512
NODE_TOKENS = 3_000_000  # about 1 TB of DRAM
HOST_LINK = 128e9  # bytes/s from host memory to the node's eight devices
LINK = 87e9  # bytes/s between nodes, as measured with four 200 Gbps NICs (fig. 12a)
TTFT_LIMIT_S, TBT_LIMIT_S = 30.0, 0.1

# Seconds of prefill = A + B (n - p) + C (n^2 - p^2) + D p, for n prompt tokens of which p are cached: fitted to fig. 14.
PREFILL = (0.0679, 1.0966e-4, 7.43e-10, 2.57e-6)
# Seconds of a decode step = base + slope x context tokens in the batch. `served` is fitted to fig. 15, which shows the mean
# of a request's slowest tenth of gaps and so contains joins; `single` is one sequence by itself (fig. 14).
DECODE = {"served": (0.0218, 3.5e-7), "single": (0.0263, 3.46e-8)}

FIG14_TOKENS = tuple(k * 1024 for k in (8, 16, 32, 64, 128))
FIG14_UNCACHED_S = (1.000, 2.053, 4.483, 10.589, 27.512)
FIG14_CACHED_S = (0.135, 0.227, 0.406, 0.882, 2.328)  # 95 % of the prompt cached
FIG8_S = {"conversation": (1.661, 1.062), "synthetic": (2.022, 0.733)}  # mean prefill: no cache (vLLM), Mooncake

# Token hit rate of one LRU cache of 1 / 3 / 10 M tokens, blocks of 512, requests in file order: exact recomputation.
LRU_HITS = {"conversation": (0.0543, 0.1387, 0.2908), "synthetic": (0.1451, 0.3151, 0.5770)}
HIT_CEILING = {"conversation": 0.3736, "synthetic": 0.6512}
LRU_SAVED_S = {"conversation": 2461.0, "synthetic": 2647.0}  # prefill seconds saved at 3 M tokens
FIG10_GLOBAL_HITS = {"conversation": 0.375, "synthetic": 0.622}

FIG5_MEAN_TTFT_S = {"random": 19.65, "load": 5.27, "local": 3.58, "global": 3.07}

# fig. 15: prefill nodes of 16 -> (effective share, mean TTFT s, mean TBT s); synthetic trace, TTFT 10 s, TBT 100 ms
FIG15 = {
    5: (0.777, 5.74, 0.0315),
    6: (0.972, 1.71, 0.0318),
    7: (0.991, 1.30, 0.0329),
    8: (0.990, 1.19, 0.0350),
    9: (0.992, 1.12, 0.0382),
    10: (0.984, 1.11, 0.0442),
    11: (0.861, 1.14, 0.0583),
}
FIG13_MEAN_TTFT_S = {24: 5.09, 40: 2.40, 80: 1.73, 100: 1.60, 160: 1.41, 320: 1.25, 400: 1.25}  # by Gbps of a node
FIG13_RECOMPUTE_S = 2.62
