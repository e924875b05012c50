"""Who wrote an object's bytes: the model, its weights, and this rank's share of it."""

from dataclasses import dataclass, fields

from kvferry.arguments import of_type
from kvferry.errors import LayoutError

PARALLEL = ("tp", "pp", "cp", "dcp")
"""Kinds of parallelism that split a model's cache, as they stand in keys."""


@dataclass(frozen=True)
class ModelIdentity:
    """What must agree before one engine may read another's pages; part of the fingerprint.

    Attributes:
        model: the model's id, as its users name it; readable in object keys.
        revision: commit or tag of the weights.
        kv_dtype: the engine's KV-cache dtype, where the pools' own dtype does not tell (raw bytes).
        draft: id of a draft model whose layers ride in the same pools.
        tp, pp, cp, dcp: (rank, size) of tensor, pipeline, context and decode-context parallelism.
        config: digest of what else decides what a token's KV is: position encoding, heads, windows,
            norms, scales, quantization, adapters of the weights; see `config_digest`. Empty if
            `model` and `revision` alone tell it.
        generation: which set of weights computed the pages, where weights change under one model
            and revision (updates in place). Engines with equal weights give the same one; readable
            in object keys, so that an old generation can be deleted by itself.
        layers: where there are several pipeline stages, which of the model's layers this one has:
            (first, end), `end` not included. Stages may be cut unevenly, and rank and size do not
            tell how. None where one stage has all.
    """

    model: str = ""
    revision: str = ""
    kv_dtype: str = ""
    draft: str = ""
    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    cp: tuple[int, int] = (0, 1)
    dcp: tuple[int, int] = (0, 1)
    config: str = ""
    generation: str = ""
    layers: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is str:
                of_type(field.name, value, str, "a string", error=LayoutError)
        for name in PARALLEL:
            rank, size = _pair(name, getattr(self, name))
            if not 0 <= rank < size:
                raise LayoutError(f"{name} is (rank {rank}, size {size}), wanted 0 <= rank < size")
        self._check_layers()

    def _check_layers(self) -> None:
        stages = self.pp[1]
        if stages == 1:
            if self.layers is not None:
                raise LayoutError(
                    f"layers is {self.layers!r}, wanted None: pp is {self.pp}, and the only stage "
                    "has all layers"
                )
            return
        if self.layers is None:
            raise LayoutError(
                f"layers is None, wanted (first, end) of this stage: pp is {self.pp}, and stages "
                "that are cut in other places would share keys"
            )
        first, end = _pair("layers", self.layers)
        if not 0 <= first < end:
            raise LayoutError(f"layers is (first {first}, end {end}), wanted 0 <= first < end")

    @property
    def share(self) -> str:
        """This rank's part of the model, as it stands in object keys: `tp0of8-pp0of1-...`.

        A pipeline stage names its first and last layer: `pp1of3.layers20to39`.
        """
        parts = {name: "{0}{1[0]}of{1[1]}".format(name, getattr(self, name)) for name in PARALLEL}
        if self.layers is not None:
            parts["pp"] += f".layers{self.layers[0]}to{self.layers[1] - 1}"
        return "-".join(parts.values())


def _pair(name: str, value: object) -> tuple[int, int]:
    """Return a pair of integers, or raise a LayoutError that names it."""
    if (
        not isinstance(value, tuple)
        or len(value) != 2
        or not all(isinstance(part, int) and not isinstance(part, bool) for part in value)
    ):
        raise LayoutError(f"{name} is {value!r}, wanted a tuple of two integers")
    return value
