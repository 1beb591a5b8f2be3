"""The metric families of lmkv: names, kinds, labels and meaning. `docs/reference/metrics.md` lists the same.

Every series also carries `instance`: the engine's where a client's doings are counted, else the service's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

SECONDS: Final = (1e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the buckets of every histogram, in seconds."""


@dataclass(frozen=True, slots=True)
class Family:
    """One family of series."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    """The HELP line; states the unit."""
    labels: tuple[str, ...] = ()
    client: bool = False
    """Counts what one client asked, got or gave: labelled with its model and rank, too."""

    @property
    def every_label(self) -> tuple[str, ...]:
        """All labels but `instance`."""
        return ("model", "rank", *self.labels) if self.client else self.labels


DROPS: Final = frozenset({"no_room", "aborted", "backlog", "fence"})
"""Reasons why a store was dropped."""

FAMILIES: Final = (
    Family("lmkv_lookups_total", "counter", "Look-ups, one per request.", client=True),
    Family(
        "lmkv_lookup_tokens_total",
        "counter",
        "Tokens asked of the cache: those that the engine does not have itself.",
        client=True,
    ),
    Family(
        "lmkv_hit_tokens_total",
        "counter",
        "Tokens that arrived in the engine's pages, by the tier they came from.",
        ("tier",),
        client=True,
    ),
    Family(
        "lmkv_withheld_tokens_total",
        "counter",
        "Tokens that are stored but were not offered: computing them is sooner than loading them from that tier.",
        ("tier",),
        client=True,
    ),
    Family("lmkv_stored_tokens_total", "counter", "Tokens whose frames were committed.", client=True),
    Family(
        "lmkv_rank_loaded_tokens_total",
        "counter",
        "Tokens of which this rank's part arrived, by the tier they came from.",
        ("tier",),
        client=True,
    ),
    Family("lmkv_rank_stored_tokens_total", "counter", "Tokens of which this rank's part was committed.", client=True),
    Family(
        "lmkv_misses_total", "counter", "Chunks that were asked for and not given, by reason.", ("reason",), client=True
    ),
    Family(
        "lmkv_dropped_stores_total",
        "counter",
        "Chunks that were not stored, by reason; counted by each rank for its shard.",
        ("reason",),
        client=True,
    ),
    Family("lmkv_evictions_total", "counter", "Frames evicted to make room.", ("tier",)),
    Family("lmkv_tier_operations_total", "counter", "Keys by operation and outcome.", ("tier", "op", "outcome")),
    Family("lmkv_tier_bytes_total", "counter", "Bytes of frames read or written.", ("tier", "op")),
    Family(
        "lmkv_tier_seconds",
        "histogram",
        "Seconds of one batch in the backend, without its time in the queue.",
        ("tier", "op"),
    ),
    Family("lmkv_tier_queue_calls", "gauge", "Calls that wait in the tier's driver.", ("tier",)),
    Family("lmkv_tier_rejected_total", "counter", "Calls refused because the tier's queue was full.", ("tier", "op")),
    Family(
        "lmkv_tier_dropped_writes_total",
        "counter",
        "Frames not copied into the tier, by reason.",
        ("tier", "reason"),
    ),
    Family(
        "lmkv_demotions_missed_total",
        "counter",
        "Frames evicted before their copy to the tier below was made.",
        ("tier",),
    ),
    Family("lmkv_corrupt_frames_total", "counter", "Frames that did not verify and were set aside.", ("tier",)),
    Family(
        "lmkv_loads_cancelled_total",
        "counter",
        "Frames whose load had not begun when the last request let go of them.",
        ("tier",),
    ),
    Family("lmkv_leases_expired_total", "counter", "Leases that ended because nobody released them in time."),
    Family(
        "lmkv_tier_load_latency_seconds", "gauge", "Seconds of a load of no bytes, as measured; 0: unknown.", ("tier",)
    ),
    Family(
        "lmkv_tier_load_bytes_per_second",
        "gauge",
        "Bytes per second of loads, all threads at once, latency aside; 0: unknown.",
        ("tier",),
    ),
    Family("lmkv_tier_open", "gauge", "1 while the tier's breaker is open.", ("tier",)),
    Family("lmkv_tier_used_bytes", "gauge", "Bytes of frames in the tier, where the core keeps its index.", ("tier",)),
    Family("lmkv_tier_capacity_bytes", "gauge", "Bytes that the tier may hold.", ("tier",)),
    Family("lmkv_pool_bytes", "gauge", "Bytes of the pool."),
    Family("lmkv_pool_free_bytes", "gauge", "Bytes of the pool that nobody holds."),
    Family("lmkv_leases", "gauge", "Leases held now."),
    Family("lmkv_pins", "gauge", "Pins held now."),
    Family("lmkv_sessions", "gauge", "Clients connected now, other nodes among them."),
    Family("lmkv_peer_sessions", "gauge", "Other nodes connected now."),
    Family(
        "lmkv_peer_bytes_total",
        "counter",
        "Bytes of frames that this node pulled from others or pushed to them.",
        ("op", "transport"),
    ),
    Family(
        "lmkv_peer_served_bytes_total",
        "counter",
        "Bytes of frames that others pushed to this node or leased here to read them.",
        ("way",),
    ),
    Family(
        "lmkv_peer_moved_bytes_total",
        "counter",
        "Bytes that others read from this node's pool and wrote into it; over `nixl` as they say themselves.",
        ("transport",),
    ),
    Family("lmkv_peer_errors_total", "counter", "What went wrong with other nodes.", ("kind",)),
    Family(
        "lmkv_peer_expired_total", "counter", "What other nodes held here and did not give back in time.", ("what",)
    ),
    Family(
        "lmkv_peer_quarantined_bytes", "gauge", "Bytes of the pool that nobody holds but another node may still touch."
    ),
    Family("lmkv_peer_admitted_bytes", "gauge", "Bytes that transfers to this node have been promised."),
    Family("lmkv_transfers_total", "counter", "Requests transferred between nodes that have ended.", ("way", "state")),
    Family("lmkv_agent_connected", "gauge", "1 while a controller has this node registered."),
    Family(
        "lmkv_agent_digests_total",
        "counter",
        "Digests told to the controller: as an `event`, or on a `page` of all that is there.",
        ("kind",),
    ),
    Family("lmkv_agent_resyncs_total", "counter", "Times that a connected controller was told everything anew."),
    Family("lmkv_agent_jobs_total", "counter", "Jobs of the controller that ended.", ("command", "state")),
    Family("lmkv_kv_events_total", "counter", "KV events published, by their kind.", ("kind",)),
    Family("lmkv_kv_event_listings_total", "counter", "Times that everything was published anew."),
    Family(
        "lmkv_controller_requests_total",
        "counter",
        "Requests to the controller, by route and HTTP status.",
        ("verb", "status"),
    ),
    Family(
        "lmkv_controller_request_seconds",
        "histogram",
        "Seconds of one request, without a wait for its job that it asked for.",
        ("verb",),
    ),
    Family("lmkv_controller_lookup_tokens_total", "counter", "Tokens that look-ups gave; those by digests count none."),
    Family("lmkv_controller_hit_tokens_total", "counter", "Tokens that the best node had, by look-up."),
    Family("lmkv_controller_jobs_total", "counter", "Jobs that are over.", ("verb", "state")),
    Family("lmkv_controller_open_jobs", "gauge", "Jobs that this controller runs now."),
    Family("lmkv_controller_nodes", "gauge", "Nodes that are registered, by state.", ("state",)),
    Family("lmkv_controller_directory_entries", "gauge", "Chunks of which the directory knows a place."),
    Family("lmkv_controller_directory_bytes", "gauge", "Bytes that it takes for them; 0: not known."),
    Family("lmkv_controller_fleet_total", "counter", "What agents did and told, by what.", ("what",)),
)
"""In the order of the documentation."""

BY_NAME: Final = {family.name: family for family in FAMILIES}
