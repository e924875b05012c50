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
def checksum_of_pairs(value, weight):
    """What two words in an int64 add to a checksum, `weight` (uint32) being that of the lower one.

    The checksum is the sum of every little-endian 32-bit word w_i of the object times 2 i + 1,
    modulo 2**64; see `checksum`. A product of 32 by 32 bits is one instruction.
    """
    low = value.to(tl.uint32).to(tl.uint64) * weight.to(tl.uint64)
    high = (value >> 32).to(tl.uint32).to(tl.uint64) * (weight + 2).to(tl.uint64)
    return (low + high).to(tl.int64)


@triton.jit
def checksum_terms(value, position, WIDTH: tl.constexpr):
    """What `value`, of WIDTH bytes at byte `position` of its object, adds to the checksum."""
    weight = ((position >> 2) * 2 + 1).to(tl.uint32)
    if WIDTH == 8:
        terms = checksum_of_pairs(value, weight)
    elif WIDTH == 4:
        terms = value.to(tl.uint32).to(tl.uint64) * weight.to(tl.uint64)
    else:
        word = (value.to(tl.uint16) if WIDTH == 2 else value.to(tl.uint8)).to(tl.uint32)
        word = word << ((position & 3) * 8).to(tl.uint32)
        terms = word.to(tl.uint64) * weight.to(tl.uint64)
    return terms.to(tl.int64)
