"""What a move costs the model beside it: a bf16 matmul on another stream, with the move and alone.

Never run on a GPU so far; its order of events is tested on stand-ins.
"""

import math
from collections.abc import Callable, Sequence

import torch

from kvferry.tuning.records import Beside
from kvferry.tuning.timing import median_ratio, timing_of

MATMUL_SIZE = 4096
NUM_MATMULS = 16
"""One after another, some milliseconds in all on a large GPU."""

_MAX_DOUBLINGS = 6


class NotCoveredError(RuntimeError):
    """The moves ended before the matmuls did, however many there were."""


def matmul_beside(
    moves: Sequence[Callable[[], object]],
    move_us: float,
    device: torch.device,
    *,
    num_rounds: int,
    matmul_size: int = MATMUL_SIZE,
) -> Beside:
    """Time matmuls on the current stream, alone and while moves run on another, turn by turn.

    Moves follow each other until the last matmul has ended, as the events say; a round in which
    they did not is taken again with twice as many.

    Args:
        moves: a rotation.
        move_us: how long one takes alone.
        device: a GPU.
        num_rounds: samples of each kind, after one more that is not kept.
        matmul_size: rows and columns of the factors.

    Raises:
        NotCoveredError: the moves ended too early, again and again.
    """
    shape = (matmul_size, matmul_size)
    left, right, out = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(3))
    side = torch.cuda.Stream(device)
    alone_us: list[float] = []
    beside_us: list[float] = []

    def sample(moves_beside: int) -> tuple[float, bool]:
        """Return how long the matmuls took in us, and whether the moves outlasted them."""
        main = torch.cuda.current_stream(device)
        start, end, moved = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for number in range(moves_beside):
                moves[number % len(moves)]()
            moved.record(side)
        start.record(main)
        for _ in range(NUM_MATMULS):
            torch.mm(left, right, out=out)
        end.record(main)
        main.synchronize()
        side.synchronize()
        return float(start.elapsed_time(end)) * 1e3, float(end.elapsed_time(moved)) >= 0

    with torch.cuda.device(device):
        sample(0)  # it loads and sets up what multiplies
        warm_us, _ = sample(0)
        num_moves = math.ceil(1.5 * warm_us / move_us) + 1
        for number in range(num_rounds + 1):
            order = (True, False) if number % 2 else (False, True)
            for with_moves in order:
                time_us, is_covered = sample(num_moves if with_moves else 0)
                for _ in range(_MAX_DOUBLINGS):
                    if is_covered or not with_moves:
                        break
                    num_moves *= 2
                    time_us, is_covered = sample(num_moves)
                if with_moves and not is_covered:
                    raise NotCoveredError(f"{num_moves} moves ended before the matmuls")
                if number:
                    (beside_us if with_moves else alone_us).append(time_us)
    return Beside(median_ratio(beside_us, alone_us), timing_of(alone_us))
