"""Units of memory. A GPU's memory is counted in GiB (2^30 B), its bandwidth and a box's label in GB (10^9 B).

Mixing them is a 7 % error at the scale of a card: 864 MiB over 64 GB/s take 14.16 ms, not 13.5.
"""

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB
GB = 10**9
TB = 10**12
