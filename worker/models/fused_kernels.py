# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Kernels that need one launch where torch needs two or three. Importing needs ``triton``."""

import triton
import triton.language as tl


@triton.jit
def add_norm(
    x,  # [rows, WIDTH], the sum is stored back
    y,  # [rows, WIDTH]
    weight,  # [WIDTH]
    out,  # [rows, WIDTH]
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    at = tl.arange(0, PADDED)
    inside = at < WIDTH
    row = tl.program_id(0).to(tl.int64) * WIDTH
    before = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    added = tl.load(y + row + at, mask=inside, other=0.0).to(tl.float32)
    # The norm uses the rounded sum, which the next layer adds to.
    rounded = (before + added).to(x.dtype.element_ty)
    tl.store(x + row + at, rounded, mask=inside)
    total = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(total * total, 0) / WIDTH + eps)
    weights = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + at, (total * scale * weights).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate(
    x,  # [tokens, heads, 2 * HALF], changed in place
    cos,  # [tokens, 2 * HALF]
    sin,  # [tokens, 2 * HALF], its first half negative
    heads,
    token_stride,
    head_stride,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, PADDED)
    inside = at < HALF
    mask = (head < heads)[:, None] & inside[None, :]
    first = x + token * token_stride + head[:, None] * head_stride + at[None, :]
    a = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(first + HALF, mask=mask, other=0.0).to(tl.float32)
    angles = token * (2 * HALF) + at
    cos_a = tl.load(cos + angles, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos + angles + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin + angles, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin + angles + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(first, (a * cos_a + b * sin_a).to(x.dtype.element_ty), mask=mask)
    tl.store(first + HALF, (b * cos_b + a * sin_b).to(x.dtype.element_ty), mask=mask)


@triton.jit
def gate(
    both,  # [rows, 2 * width]: what silu is taken of, then what it is multiplied with
    out,  # [rows, width]
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    opened = tl.load(both + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    passed = tl.load(both + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    value = opened / (1.0 + tl.exp(-opened)) * passed
    tl.store(out + row * width + at, value.to(out.dtype.element_ty), mask=inside)
