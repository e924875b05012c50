"""Small functions that several kernels call on the device."""

import triton
import triton.language as tl


@triton.jit
def divide(number, packed_divisor):
    """`number // d` for 0 <= number < 2**31, by the multiplier of `tables.divisor(d)`."""
    multiplier = packed_divisor.to(tl.uint32)
    shift = ((packed_divisor >> 32) - 1).to(tl.uint32)
    return (tl.umulhi(number.to(tl.uint32) * 2, multiplier) >> shift).to(tl.int32)


@triton.jit
def load_page_id(ids_address, page, mask, ID_BYTES: tl.constexpr):
    """Entry `page` of an int32 or int64 array, as int64; -1, which is no page, where masked out."""
    if ID_BYTES == 4:
        page_id = tl.load(ids_address.to(tl.pointer_type(tl.int32)) + page, mask=mask, other=-1)
    else:
        page_id = tl.load(ids_address.to(tl.pointer_type(tl.int64)) + page, mask=mask, other=-1)
    return page_id.to(tl.int64)
