"""A gather by single elements, as engines write it: what a kernel with narrow loads looks like."""

import triton
import triton.language as tl


@triton.jit
def gather_kernel(
    pool, page_ids, staging, pool_stride, num_elements, ROW: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy rows of ROW elements of 2 bytes, in the order of their page ids."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < num_elements
    page_id = tl.load(page_ids + place // ROW, mask=mask, other=0)
    value = tl.load(pool + page_id * pool_stride + place % ROW, mask=mask)
    tl.store(staging + place, value, mask=mask)
