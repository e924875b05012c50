"""Copies of one tile by accesses of 16 and of 32 bytes: is the wider one worth inline assembly?

For `python -m kvferry.tuning inspect --function`; the answer is in `docs/inspection.md`. Triton's
own loads and stores are of 16 bytes at most; 32 exist from sm_100 on.
"""

import triton
import triton.language as tl


@triton.jit
def copy_by_16(
    source: tl.int64,  # address, 16-byte aligned
    target: tl.int64,
    num_bytes: tl.int32,  # a multiple of 16, at most BYTES
    BYTES: tl.constexpr,
):
    """As the page kernel moves a tile, without the search for it."""
    word = tl.arange(0, BYTES // 8)
    from_words = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16) + word
    to_words = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16) + word
    mask = word < tl.multiple_of(num_bytes >> 3, 2)
    tl.store(to_words, tl.load(from_words, mask=mask, other=0), mask=mask)


@triton.jit
def copy_by_32(
    source: tl.int64,  # address, 32-byte aligned
    target: tl.int64,
    num_bytes: tl.int32,  # a multiple of 32, at most BYTES
    BYTES: tl.constexpr,
):
    """The same by inline assembly."""
    unit = tl.arange(0, BYTES // 32)
    mask = (unit < (num_bytes >> 5)).to(tl.int32)
    first, second, third, fourth = tl.inline_asm_elementwise(
        """{
        .reg .pred on;
        setp.ne.s32 on, $5, 0;
        mov.b64 $0, 0; mov.b64 $1, 0; mov.b64 $2, 0; mov.b64 $3, 0;
        @on ld.global.v4.b64 {$0, $1, $2, $3}, [$4];
        }""",
        "=&l,=&l,=&l,=&l,l,r",
        [source + unit.to(tl.int64) * 32, mask],
        dtype=(tl.int64, tl.int64, tl.int64, tl.int64),
        is_pure=False,
        pack=1,
    )
    tl.inline_asm_elementwise(
        """{
        .reg .pred on;
        setp.ne.s32 on, $6, 0;
        mov.b32 $0, 0;
        @on st.global.v4.b64 [$1], {$2, $3, $4, $5};
        }""",
        "=&r,l,l,l,l,l,r",
        [target + unit.to(tl.int64) * 32, first, second, third, fourth, mask],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
