"""Everything an engine counts, at one moment: plain data, for whoever reports it."""

from copy import deepcopy
from dataclasses import dataclass, field

from kv8.cache.manager import CacheStats
from kv8.engine.counters import EngineCounters
from kv8.engine.engine import Engine
from kv8.engine.report import KVCacheReport, live_report, planned_report
from kv8.engine.resolve import ResolvedConfig


@dataclass(frozen=True)
class BlockUse:
    """What the cache's blocks are used for.

    Attributes:
        used: referenced by running sequences.
        cached: nobody's, but their contents can still be found.
        free: hold nothing.
    """

    used: int = 0
    cached: int = 0
    free: int = 0

    @property
    def usage(self) -> float:
        """Share of blocks that running sequences reference, from 0 to 1."""
        total = self.used + self.cached + self.free
        return self.used / total if total else 0.0

    def by_use(self) -> dict[str, int]:
        """Return the three counts by name."""
        return {"used": self.used, "cached": self.cached, "free": self.free}


@dataclass(frozen=True)
class EngineSnapshot:
    """One moment of an engine; nothing in it changes afterwards.

    Attributes:
        report: the layer table, capacity and settings.
        warnings: what a person should act on.
        num_running: sequences that hold blocks.
        num_waiting: sequences that hold none.
        num_preemptions: how often a running sequence had to give up its blocks.
        blocks: what the cache's blocks are used for.
        prefix: what was looked for and found in the prefix cache.
        counters: what the engine has done.
    """

    report: KVCacheReport
    warnings: tuple[str, ...] = ()
    num_running: int = 0
    num_waiting: int = 0
    num_preemptions: int = 0
    blocks: BlockUse = BlockUse()
    prefix: CacheStats = field(default_factory=CacheStats)
    counters: EngineCounters = field(default_factory=EngineCounters)


def planned_snapshot(config: ResolvedConfig) -> EngineSnapshot:
    """Return what can be said before there is an engine: plan, scales and capacity, no counts."""
    return EngineSnapshot(
        report=planned_report(config),
        warnings=config.warnings,
        blocks=BlockUse(free=config.capacity.num_blocks),
    )


def take_snapshot(engine: Engine) -> EngineSnapshot:
    """Return the engine's counts; to be called where the engine is stepped, between two steps."""
    cache, scheduler = engine.cache, engine.scheduler
    cached = cache.num_cached_blocks
    return EngineSnapshot(
        report=live_report(engine.config, engine.runner),
        warnings=engine.config.warnings,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_preemptions=scheduler.num_preemptions,
        blocks=BlockUse(
            used=cache.num_blocks - cache.num_free_blocks,
            cached=cached,
            free=cache.num_free_blocks - cached,
        ),
        prefix=cache.stats,
        counters=deepcopy(engine.counters),
    )
