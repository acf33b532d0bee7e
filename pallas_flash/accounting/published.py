"""What the paper of FlashAttention (arXiv:2205.14135, figure 2) printed for GPT-2 medium on an
A100, and formulas that give it.

|                         | standard | flash |
|-------------------------|----------|-------|
| GFLOPs                  | 66.6     | 75.2  |
| GB of device memory     | 40.3     | 4.4   |
| ms                      | 41.7     | 7.3   |

Forward and backward of sequence 1024, head size 64, 16 heads, batch 64, in 16 bits, with a mask and
dropout. The kernels here differ: S and all sums are float32, there is no dropout, and P is not kept
for the backward. So these formulas are of what the paper compared: `frameworks`, attention as
PyTorch ran it, and `flash`, the paper's algorithms 1 and 4 as printed.

The bytes follow: 18 passes over T x S and 12 over T x H make 40.3 GB; an SRAM of 192 KB, M = 98304
elements, makes T_c = 3 and 4.6 GB. The FLOPs do not: the products of all heads are 825 and 962
GFLOPs, and 962 in 7.3 ms are a credible 42% of the A100's peak. But the printed difference, 8.6, is
the one product that flash computes again, 2 T^2 H B, without the factor of 16 heads; and with all
products counted for one head, all else for 16, both come within 2%: `printed_flops`.
"""

import jax
import jax.numpy as jnp

from pallas_flash.accounting.costs import Cost, Sizes, total
from pallas_flash.arguments import Problem
from pallas_flash.explanation import explain

GFLOPS = dict(standard=66.6, flash=75.2)
GIGABYTES = dict(standard=40.3, flash=4.4)
MILLISECONDS = dict(standard=41.7, flash=7.3)

A100_SRAM = 192 * 1024 // 2  # elements of 16 bits in the fast memory of a multiprocessor


def gpt2_medium() -> Problem:
    """The call that the paper measured, as far as it is a Problem."""
    q = jax.ShapeDtypeStruct((64, 1024, 16, 64), jnp.float16)
    return explain(q, q, q).problem


def frameworks(p: Problem) -> dict[str, Cost]:
    """Each step a kernel that reads and writes all of T x S; dropout keeps a byte for each entry; P
    is kept for the backward."""
    z = Sizes(p, 1, 1)
    n, e = z.entries, z.e
    product = lambda size: 2 * n * size
    return dict(
        # times the scale
        scores=Cost(matrix=product(z.H), other=n, reads=z.q + z.key, writes=e * n),
        mask=Cost(other=n, reads=e * n, writes=e * n),
        # max, subtract, sum, divide
        softmax=Cost(exponentials=n, other=4 * n, reads=e * n, writes=e * n),
        dropout=Cost(other=2 * n, reads=e * n, writes=(e + 1) * n),  # mask, rescale
        values=Cost(matrix=product(z.V), reads=e * n + z.value, writes=z.o),
        dv=Cost(matrix=product(z.V), reads=e * n + z.o, writes=z.value),
        dp=Cost(matrix=product(z.V), reads=z.o + z.value, writes=e * n),
        dropout_backward=Cost(other=2 * n, reads=(e + 1) * n, writes=e * n),
        # p dp, its sum, subtract, times p
        softmax_backward=Cost(other=4 * n, reads=2 * e * n, writes=e * n),
        dq=Cost(matrix=product(z.H), other=n, reads=e * n + z.key, writes=z.q),  # times the scale
        dk=Cost(matrix=product(z.H), reads=e * n + z.q, writes=z.key),
    )


def flash(p: Problem, sram: int = A100_SRAM) -> dict[str, Cost]:
    """Algorithms 1 and 4 for an SRAM of M elements: T_c = ceil(4 H S / M) tiles of keys, with
    masking and dropout.

    Forward: O, l and m written as zeros; K and V once; T_c times Q read, O, l and m read and
    written. Backward: dQ, dK and dV written as zeros; K and V once; T_c times Q, O, dO, dQ, l and m
    read, dQ written; dK and dV written.

    Other FLOPs to an entry: 7, scale, mask, maximum, subtract, sum and two of dropout; and in the
    backward 8, scale, mask, subtract, divide by l, dropout of P and of dP, subtract D, times P.
    """
    z = Sizes(p, 1, -(-sram // (4 * max(p.head_size, p.value_size))))
    n, state = z.entries, z.o + 2 * z.statistic
    return dict(
        forward=Cost(
            matrix=2 * n * (z.H + z.V),
            exponentials=n,
            other=7 * n,
            reads=z.key + z.value + z.n_k * (z.q + state),
            writes=(1 + z.n_k) * state,
        ),
        backward=Cost(
            matrix=2 * n * (3 * z.H + 2 * z.V),
            exponentials=n,
            other=8 * n,
            reads=z.key + z.value + z.n_k * (2 * z.q + 2 * z.o + 2 * z.statistic),
            writes=(1 + z.n_k) * z.q + 2 * (z.key + z.value),
        ),
    )


def printed_flops(p: Problem, kernels: dict[str, Cost]) -> float:
    """The products of one head, and all else of all heads: what fits the paper's GFLOPs."""
    whole = total(kernels)
    return whole.matrix / p.heads + whole.other
