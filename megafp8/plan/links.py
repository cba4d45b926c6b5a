"""Time of one rank's messages: which links a group of ranks spans, and what they carry.

Ranks are numbered as in parallel.py, so a group of ranks at a distance lies within a node or takes so many of each node
along. Collectives are rings: in one that leaves the node its members there use their network adapters together. Of what
is dealt out (all-to-all) the share for other nodes goes over the network, the rest over NVLink at the same time. Every
message costs a latency for each doubling of the ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megafp8.config import Config
from megafp8.config.parallel import layout_sizes
from megafp8.plan.cluster import Cluster
from megafp8.plan.traffic import Traffic

DENSE, EXPERT = ("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")
"""Axes, neighbouring ranks first."""
JOINT = {"dp_cp": "cp", "ep_etp": "etp"}
"""Axes of two, by the one of them that has the neighbouring ranks."""


@dataclass(frozen=True)
class Links:
    """strides: distance of a group's ranks, by the group's name."""

    cluster: Cluster
    strides: dict[str, int]

    @staticmethod
    def of(config: Config, cluster: Cluster) -> Links:
        sizes, strides = layout_sizes(config.parallel), {"world": 1}
        for order in (DENSE, EXPERT):
            stride = 1
            for name in order:
                strides.setdefault(name, stride)
                stride *= sizes[name]
        return Links(cluster, strides | {name: strides[first] for name, first in JOINT.items()})

    def in_node(self, traffic: Traffic) -> int:
        """Ranks of the group that share a node."""
        return max(1, min(traffic.size, self.cluster.gpus_per_node // self.strides[traffic.group]))

    def seconds(self, traffic: Traffic) -> float:
        """Time of all its messages, one after the other."""
        c, here = self.cluster, self.in_node(traffic)
        nvlink, network = (speed * 1e9 * c.efficiency for speed in (c.nvlink_gb_per_s, c.network_gb_per_s))
        inside = here == traffic.size
        if traffic.kind == "send":
            busy = traffic.bytes / (nvlink if self._next_is_near(traffic) else network)
        elif inside:
            busy = traffic.wire_bytes / nvlink
        elif traffic.kind == "deal":
            outside = (traffic.size - here) / max(1, traffic.size - 1)
            busy = traffic.wire_bytes * max(outside / network, (1 - outside) / nvlink)
        else:
            busy = traffic.wire_bytes / min(nvlink, here * network)
        latency = (c.nvlink_latency_us if inside else c.network_latency_us) * 1e-6
        return busy + traffic.messages * latency * max(1, math.ceil(math.log2(traffic.size)))

    def _next_is_near(self, traffic: Traffic) -> bool:
        """Whether neighbours on the axis share a node."""
        return self.strides[traffic.group] < self.cluster.gpus_per_node
