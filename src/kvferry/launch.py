"""How the kernels are launched: tile sizes, warps and cache hints, as frozen data."""

from dataclasses import dataclass

from kvferry.errors import ArgumentError

MAX_PROGRAMS = 2**16
"""Of a budget: many more than any GPU holds at once."""

CACHE_HINTS = ("none", "stream", "keep_written")
"""What a move asks of the caches; a kernel knows a hint by its place here.

`none`: nothing. `stream`: what is read and what is written goes first when room is wanted, for a
move touches each byte once, and the model beside it wants its own data in L2. `keep_written`: only
what is read goes first. What was written is read again soon, a packed object by a NIC or a copy
engine, an unpacked page by attention, and from L2 if it is still there.
"""

FORMS = ("auto", "bulk")
"""`auto`: the page kernel. `bulk`: bulk copies where they can do it, see `kernels.bulk`; no GPU has
run them yet."""

BULK_TILE_BYTES = 16384
"""A bulk copy's tile, at most: one must be loaded while another is stored, both within 48 KiB."""


@dataclass(frozen=True)
class LaunchConfig:
    """Numbers of one launch. The defaults are derived, not measured.

    By compile-only inspection for sm_90 and sm_100, a 16 KiB tile with 4 warps keeps eight 16-byte
    loads per thread in flight (160 KB per SM at 46 registers), the best of the tiles that balance
    well; runs under 4 KiB leave most of such a tile idle and go by 16-byte units instead.

    Attributes:
        tile_bytes: bytes that one program of the page kernel moves; a power of two, 1 KiB or more.
        tile_warps: warps of such a program.
        units_per_program: units (of 16 bytes or fewer) that one program of the short-run kernel
            moves; a power of two.
        unit_warps: warps of such a program.
        page_run_bytes: runs of at least this length, and 16-byte aligned, take the page kernel.
        max_programs: programs that a launch has at most: a budget of multiprocessors, kept from a
            model that runs beside it. Programs then go on from tile to tile. 0 sets no bound: each
            tile has a program of its own, which is the quickest when nothing else runs.
        cache: one of `CACHE_HINTS`. Bytes are the same with each.
        form: one of `FORMS`; `bulk` is for few programs, and needs a bound on them.
    """

    tile_bytes: int = 16384
    tile_warps: int = 4
    units_per_program: int = 1024
    unit_warps: int = 4
    page_run_bytes: int = 4096
    max_programs: int = 0
    cache: str = "none"
    form: str = "auto"

    def __post_init__(self) -> None:
        for name, least in (("tile_bytes", 1024), ("units_per_program", 32)):
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise ArgumentError(f"{name} is {value}, wanted a power of two of at least {least}")
        for name in ("tile_warps", "unit_warps"):
            value = getattr(self, name)
            if value not in (1, 2, 4, 8, 16, 32):
                raise ArgumentError(f"{name} is {value}, wanted a power of two from 1 to 32")
        if self.page_run_bytes < 16:
            raise ArgumentError(f"page_run_bytes is {self.page_run_bytes}, wanted at least 16")
        if not 0 <= self.max_programs <= MAX_PROGRAMS:
            raise ArgumentError(
                f"max_programs is {self.max_programs}, wanted 0 (no bound) .. {MAX_PROGRAMS}"
            )
        if self.cache not in CACHE_HINTS:
            raise ArgumentError(f"cache is {self.cache!r}, wanted one of {CACHE_HINTS}")
        if self.form not in FORMS:
            raise ArgumentError(f"form is {self.form!r}, wanted one of {FORMS}")
        if self.form == "bulk":
            self._check_bulk()

    def _check_bulk(self) -> None:
        if not self.max_programs:
            raise ArgumentError("form is 'bulk' and max_programs is 0, wanted a bound")
        if self.tile_bytes > BULK_TILE_BYTES:
            raise ArgumentError(
                f"form is 'bulk' and tile_bytes is {self.tile_bytes}, wanted at most "
                f"{BULK_TILE_BYTES}"
            )
        if self.cache != "none":
            raise ArgumentError(f"form is 'bulk' and cache is {self.cache!r}, wanted 'none'")

    def programs_for(self, num_tiles: int) -> int:
        """Return how many programs a launch of so many tiles has."""
        return min(num_tiles, self.max_programs or num_tiles)


DEFAULT_LAUNCH = LaunchConfig()
