"""What the controller counts, as of now: gauges and totals that others keep, brought up to date for each scrape."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmkv.controller.fleet import Fleet
    from lmkv.controller.jobs import Jobs
    from lmkv.observe.metrics import Metrics


async def gauge(metrics: Metrics, fleet: Fleet, jobs: Jobs) -> None:
    """Bring everything up to date that is not counted when it happens."""
    states = Counter("connected" if record.connected else "away" for record in (await fleet.nodes()).values())
    for state in ("connected", "away"):
        metrics.set("lmkv_controller_nodes", states[state], state=state)
    size = await fleet.directory.size()
    metrics.set("lmkv_controller_directory_entries", size.entries)
    metrics.set("lmkv_controller_directory_bytes", size.nbytes)
    metrics.set("lmkv_controller_open_jobs", jobs.open)
    for what, count in fleet.counts.items():
        metrics.counter("lmkv_controller_fleet_total", what=what).set(count)
