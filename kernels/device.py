"""Small functions that several kernels call on the device."""

import triton
import triton.language as tl

PACK = 0
UNPACK = 1
SUM_ONLY = 2
"""What a kernel does: pages to objects, objects to pages, or read objects for their checksums."""

WHOLE = 0
ZERO_TAIL = 1
KEEP_TAIL = 2
"""The last page of an unpack: all of it, or its first tokens and zeros, or its first tokens."""

PLACE_1 = tl.constexpr(0x9E3779B1)
PLACE_2 = tl.constexpr(0x85EBCA6A)
PLACE_3 = tl.constexpr(0xC2B2AE35)
SPREAD = tl.constexpr(0x9E3779B1)
"""Multipliers of the checksum: three make a key of a place, one spreads a word; see `checksum`."""


@triton.jit
def divide(number, packed_divisor):
    """`number // d` for 0 <= number < 2**31, by the multiplier of `tables.divisor(d)`."""
    multiplier = packed_divisor.to(tl.uint32)
    shift = ((packed_divisor >> 32) - 1).to(tl.uint32)
    return (tl.umulhi(number.to(tl.uint32) * 2, multiplier) >> shift).to(tl.int32)


@triton.jit
def load_page_id(ids_address, page, mask, ID_BYTES: tl.constexpr):
    """Entry `page` of an int32 or int64 array, as int64; anything where masked out."""
    place = page.to(tl.uint32)  # unsigned, its address takes one instruction less
    if ID_BYTES == 4:
        page_id = tl.load(ids_address.to(tl.pointer_type(tl.int32)) + place, mask=mask)
    else:
        page_id = tl.load(ids_address.to(tl.pointer_type(tl.int64)) + place, mask=mask)
    return page_id.to(tl.int64)


@triton.jit
def load_payload(pointers, mask, CACHE: tl.constexpr):
    """Words or units of payload, zeros where masked out; CACHE is a place in `CACHE_HINTS`."""
    if CACHE == 0:
        value = tl.load(pointers, mask=mask, other=0)
    else:
        value = tl.load(pointers, mask=mask, other=0, eviction_policy="evict_first")
    return value


@triton.jit
def store_payload(pointers, value, mask, CACHE: tl.constexpr):
    """Store payload; CACHE is a place in `CACHE_HINTS`."""
    if CACHE == 1:
        # Evicts first, as an eviction policy would, which takes more instructions and registers.
        tl.store(pointers, value, mask=mask, cache_modifier=".cs")
    else:
        tl.store(pointers, value, mask=mask)


@triton.jit
def checksum_terms(value, pair):
    """What 8 bytes in an int64 add to a checksum, as pair number `pair` (uint32) of the object.

    The definition stands in `checksum`; a product of 32 by 32 bits is one instruction.
    """
    # In numbers of 32 bits up to the product: of 64-bit ones LLVM would make longer products.
    first = pair * PLACE_1
    second = pair * PLACE_2 + PLACE_3
    key = tl.umulhi(first, second)
    low = (value.to(tl.uint32) ^ first ^ key) * SPREAD
    high = ((value >> 32).to(tl.uint32) ^ second ^ key) * SPREAD
    both = low.to(tl.uint64) | (high.to(tl.uint64) << 32)
    product = low.to(tl.uint64) * high.to(tl.uint64) + both
    return (product ^ (product >> 32)).to(tl.int64)
