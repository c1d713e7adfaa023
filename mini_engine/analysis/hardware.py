"""What a card and a link can do at most, from vendors' sheets (data/hardware.toml names the sheet of each figure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mini_engine.analysis.inputs import AnalysisError, not_negative, positive, whole
from mini_engine.analysis.tables import entry, read_table
from mini_engine.analysis.units import MiB


@dataclass(frozen=True)
class Hardware:
    """One accelerator, or a CPU whose read rate you measured yourself.

    bandwidth: bytes a second read from its own memory.
    peak_flops: dense operations a second by element type; a multiply-add counts as two.
    nominal_bytes: memory as printed on the box. reported_mib: as the driver reports it, None where unknown.
    power_w: power limit in watts, None where none is stated. links: names for `get_link`.
    """

    name: str
    bandwidth: float
    peak_flops: Mapping[str, float]
    nominal_bytes: int = 0
    reported_mib: int | None = None
    power_w: float | None = None
    links: tuple[str, ...] = ()
    title: str = ""
    source: str = field(default="", repr=False)
    note: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        positive(bandwidth=self.bandwidth, **self.peak_flops)
        whole(0, nominal_bytes=self.nominal_bytes, reported_mib=self.reported_mib or 0)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory as the driver reports them; the nominal figure where that is all there is."""
        return self.nominal_bytes if self.reported_mib is None else self.reported_mib * MiB

    def peak(self, dtype: str = "bfloat16") -> float:
        """Dense operations a second on elements of `dtype`. Raises AnalysisError where no figure is known."""
        if dtype not in self.peak_flops:
            known = ", ".join(self.peak_flops) or "none"
            raise AnalysisError(f"no peak of {self.name} is known for {dtype}, only for: {known}")
        return self.peak_flops[dtype]


@dataclass(frozen=True)
class Link:
    """A connection between memories. bandwidth: bytes a second in one direction, nominal."""

    name: str
    bandwidth: float
    title: str = ""
    source: str = field(default="", repr=False)
    note: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        positive(bandwidth=self.bandwidth)

    def seconds(self, num_bytes: float) -> float:
        """Least time to move that many bytes one way; no latency, no protocol."""
        not_negative(num_bytes=num_bytes)
        return num_bytes / self.bandwidth


def hardware_names() -> tuple[str, ...]:
    return tuple(read_table("hardware")["hardware"])


def link_names() -> tuple[str, ...]:
    return tuple(read_table("hardware")["link"])


def get_hardware(name: str) -> Hardware:
    """A card of the table. Raises AnalysisError with the names there are."""
    values = entry(read_table("hardware")["hardware"], name, "hardware")
    return Hardware(name=name, **{**values, "links": tuple(values["links"])})


def get_link(name: str) -> Link:
    """A link of the table. Raises AnalysisError with the names there are."""
    return Link(name=name, **entry(read_table("hardware")["link"], name, "link"))


# The card of the book's measurements.
RTX_PRO_6000 = get_hardware("rtx-pro-6000")
