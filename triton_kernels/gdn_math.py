"""Device functions of the Gated DeltaNet kernels: gates, exact products, the triangular inverse."""

from __future__ import annotations

from forespark.triton_kernels._triton import tl, triton


@triton.jit
def decay_and_step(a, b, a_log, dt_bias):
    """Log decay -exp(A_log) softplus(a + dt_bias) and step size sigmoid(b), in float32."""
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    # log(1 + u) as 2 atanh(u / (2 + u)): log itself rounds 1 + u, which a long decay adds up.
    u = tl.exp(-tl.abs(x))
    s = u / (2.0 + u)
    s2 = s * s
    series = 1.0 / 9.0 + s2 * (1.0 / 11.0 + s2 * (1.0 / 13.0 + s2 * (1.0 / 15.0)))
    series = 1.0 + s2 * (1.0 / 3.0 + s2 * (1.0 / 5.0 + s2 * (1.0 / 7.0 + s2 * series)))
    softplus = tl.maximum(x, 0.0) + 2.0 * s * series
    g = -tl.exp(a_log.to(tl.float32)) * softplus
    # exp(-200) is 0 in float32, and finite decays keep 0 * g at 0. NaN stays NaN.
    g = tl.where(g < -200.0, -200.0, g)
    return g, 1.0 / (1.0 + tl.exp(-b.to(tl.float32)))


@triton.jit
def exact_dot(wide, narrow, acc, TERMS: tl.constexpr, UPCAST: tl.constexpr):
    """acc + wide @ narrow, exact to float32 rounding.

    A bfloat16 `narrow` is exact on tensor cores, so a float32 `wide` goes there as TERMS bfloat16
    summands: 3 hold its 24 bits, 1 is enough when it came from bfloat16. TERMS = 0 multiplies in
    float32. UPCAST: the interpreter would multiply the bit patterns of bfloat16.
    """
    if TERMS == 0:
        return tl.dot(wide, narrow.to(tl.float32), acc, input_precision="ieee")
    if UPCAST:
        narrow = narrow.to(tl.float32)
    for _ in tl.static_range(TERMS):
        term = wide.to(tl.bfloat16)
        wide -= term.to(tl.float32)
        if UPCAST:
            acc = tl.dot(term.to(tl.float32), narrow, acc, input_precision="ieee")
        else:
            acc = tl.dot(term, narrow, acc)
    return acc


@triton.jit
def raw_dot(left, right, acc, TERMS: tl.constexpr, UPCAST: tl.constexpr):
    """acc + left @ right of two raw operands: exact products, float32 sums."""
    if TERMS == 0 or UPCAST:
        left, right = left.to(tl.float32), right.to(tl.float32)
        return tl.dot(left, right, acc, input_precision="ieee")
    return tl.dot(left, right, acc)


@triton.jit
def unit_upper_inverse(coupling, TOKENS: tl.constexpr):
    """(I + coupling)^-1 of a strictly upper triangular [16, 16] matrix, exact up to rounding.

    Two levels of 4: first the 4x4 diagonal blocks, then what is left of the blocks' rows. On each
    level X^4 = 0. One series in X over all 16 has huge terms that cancel when keys repeat.
    """
    row = tl.arange(0, TOKENS)[:, None]
    col = tl.arange(0, TOKENS)[None, :]
    same_block = (row // 4) == (col // 4)
    eye = tl.where(row == col, 1.0, 0.0)
    x = tl.where(same_block, -coupling, 0.0)
    off = tl.where(same_block, 0.0, coupling)
    x2 = tl.dot(x, x, input_precision="ieee")
    blocks = tl.dot(eye + x, eye + x2, input_precision="ieee")
    n = -tl.dot(blocks, off, input_precision="ieee")
    n2 = tl.dot(n, n, input_precision="ieee")
    series = tl.dot(eye + n, eye + n2, input_precision="ieee")
    return tl.dot(series, blocks, input_precision="ieee")
