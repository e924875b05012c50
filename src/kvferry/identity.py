"""Who wrote an object's bytes: model, revision, and this rank's share of it."""

from dataclasses import dataclass

from kvferry.errors import LayoutError


@dataclass(frozen=True)
class ModelIdentity:
    """What must agree before one engine may read another's pages; part of the fingerprint.

    Attributes:
        model: the model's id, as its users name it.
        revision: commit or tag of the weights.
        kv_dtype: the engine's KV-cache dtype, where the pools' own dtype does not tell (raw bytes).
        draft: id of a draft model whose layers ride in the same pools.
        tp, pp, cp, dcp: (rank, size) of tensor, pipeline, context and decode-context parallelism.
    """

    model: str = ""
    revision: str = ""
    kv_dtype: str = ""
    draft: str = ""
    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    cp: tuple[int, int] = (0, 1)
    dcp: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "dcp"):
            rank, size = getattr(self, name)
            if not 0 <= rank < size:
                raise LayoutError(f"{name} is (rank {rank}, size {size}), wanted 0 <= rank < size")

    @property
    def share(self) -> str:
        """This rank's part of the model, as it stands in object keys: `tp0of8-pp0of1-...`."""
        parts = (
            f"{name}{getattr(self, name)[0]}of{getattr(self, name)[1]}"
            for name in ("tp", "pp", "cp", "dcp")
        )
        return "-".join(parts)
