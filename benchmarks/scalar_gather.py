"""Gathers by single elements, as engines write them: what kernels with narrow loads look like."""

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


@triton.jit
def gather_pools_kernel(
    addresses,  # [num_pools] int64, of the pools' first rows
    page_ids,  # [num_pages] int32
    staging,  # int16, object after object
    token_stride,  # from a token's row to the next in a pool, in elements
    object_stride,  # from an object to the next, in elements
    num_elements,  # of all pages in one pool
    PAGE: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy rows of ROW elements of 2 bytes of many pools, pool after pool in each page's object.

    One launch for all layers, the pools' addresses in a table: so does SGLang's staging gather. A
    pointer from a table has no known alignment, so each element is a load of its own.
    """
    number = tl.program_id(1)
    pool = tl.load(addresses + number).to(tl.pointer_type(tl.int16))
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < num_elements
    token = place // ROW
    page = token // PAGE
    in_page = token % PAGE
    page_id = tl.load(page_ids + page, mask=mask, other=0).to(tl.int64)
    value = tl.load(pool + (page_id * PAGE + in_page) * token_stride + place % ROW, mask=mask)
    target = page * object_stride + (number * PAGE + in_page) * ROW + place % ROW
    tl.store(staging + target, value, mask=mask)
