"""The cache manager against a model of contents: what a table points to is the right token.

A shadow of the arena holds, for each group and slot, which prefix the token stored there ends.
Before each step every key that its queries can see is looked up through the block tables and must
be exactly the prefix of the sequence up to that position, whoever stored it.
"""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)
from tests.cache_models import make_geometry, make_plan

from kv8.cache.capacity import longest_sequence, peak_blocks
from kv8.cache.layout import CacheLayout, make_layout
from kv8.cache.manager import CacheManager

BLOCK = 4
CHUNK = 10
CHUNKS = st.lists(st.integers(1, CHUNK), min_size=1, max_size=8)


def layouts() -> dict[str, CacheLayout]:
    def layout(windows, formats="fp8_e4m3", **more):
        geometry = make_geometry(windows, max_position=64, **more)
        return make_layout(geometry, make_plan(geometry, formats), BLOCK, CHUNK)

    return {
        "uniform": layout([None, None]),
        "one window": layout([7, 7]),
        "full and window": layout([6, 6, None, 6, 6, None]),
        "window of one": layout([1, None]),
        "window of a block": layout([BLOCK, None]),
        "window of a block and one": layout([BLOCK + 1, None]),
        "two windows": layout([3, 9, None]),
        "two windows, no full": layout([3, 9]),
        # Full layers take half the bytes: their blocks have two parts.
        "parts": layout([9, None], ["bfloat16", "fp8_e4m3"]),
        # ... and here the window layers' blocks have them.
        "window parts": layout([9, None], ["fp8_e4m3", "float32"]),
        "shared": layout([6, None, 6, None], kv_sources={2: 0, 3: 1}),
    }


LAYOUTS = layouts()


def test_the_layouts_cover_blocks_of_several_parts():
    assert [g.parts for g in LAYOUTS["parts"].groups] == [2, 1]
    assert [g.parts for g in LAYOUTS["window parts"].groups] == [1, 4]
    assert len(LAYOUTS["full and window"].groups) == 3


@dataclass
class Running:
    tokens: list[int]
    computed: int
    epoch: int


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        name=st.sampled_from(sorted(LAYOUTS)),
        spare=st.integers(0, 40),
        caching=st.sampled_from([True, True, True, False]),
    )
    def make(self, name, spare, caching):
        self.layout = LAYOUTS[name]
        self.num_blocks = peak_blocks(self.layout, 20) + spare
        self.epoch = 0
        self.caching = caching
        self.manager = CacheManager(
            self.layout, self.num_blocks, enable_prefix_caching=caching, digest_key=b"0"
        )
        self.shadow = [{} for _ in self.layout.groups]
        self.running: dict[int, Running] = {}
        self.prompts: list[list[int]] = []
        self.next_name = 0
        self.longest = longest_sequence(self.layout, self.num_blocks)

    @rule(
        which=st.integers(0, 99),
        keep=st.one_of(st.none(), st.integers(0, 30)),
        tail=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        reuse=st.sampled_from([True, True, True, False]),
        chunks=CHUNKS,
    )
    def start(self, which, keep, tail, reuse, chunks):
        """Start with the head of an earlier prompt, or all of it, and go on differently or not."""
        head = self.prompts[which % len(self.prompts)][:keep] if self.prompts else []
        tokens = head if keep is None and head and which % 2 else head + tail
        if not self.manager.fits_alone(len(tokens)):
            return
        self.prompts.append(tokens)
        name, self.next_name = self.next_name, self.next_name + 1
        cached = self.manager.start(name, tokens, reuse_prefix=reuse)
        assert cached % BLOCK == 0
        assert 0 <= cached < len(tokens)
        if not (reuse and self.caching):
            assert cached == 0
        self.running[name] = Running(list(tokens), cached, self.epoch)
        self.check_visible(name, cached, query=cached)
        self.run(self.next_name - 1, chunks)

    @rule(which=st.integers(0, 99), chunks=CHUNKS)
    def run(self, which, chunks):
        """Compute some chunks of one sequence; beyond its tokens it generates zeros."""
        name = which if which in self.running else self.pick(which)
        for length in chunks:
            if name in self.running:
                self.step(name, length)

    def step(self, name, length):
        state = self.running[name]
        if state.computed == len(state.tokens):
            state.tokens.append(0)
        stop = min(len(state.tokens), state.computed + length)
        if not self.manager.fits_alone(stop):
            self.release(name)
            return
        before = self.free_and_tables()
        could = self.manager.can_hold(name, stop)
        while not self.manager.reserve(name, stop):
            assert self.free_and_tables() == before, "a refused reservation changed something"
            assert not could, "can_hold said yes and reserve no"
            others = sorted(self.running.keys() - {name})
            # Alone in the cache, a sequence within the longest length always goes on.
            assert others, f"{stop} tokens do not fit alone, but fits_alone said so"
            self.release(others[-1])  # preempted: may be started again
            before = self.free_and_tables()
            could = self.manager.can_hold(name, stop)
        self.store(name, state.computed, stop)
        for position in range(state.computed, stop):
            self.check_visible(name, position + 1, query=position)
        self.manager.commit(name, state.tokens, stop)
        state.computed = stop

    @rule(which=st.integers(0, 99))
    def finish(self, which):
        if self.running:
            self.release(self.pick(which))

    def pick(self, which):
        names = sorted(self.running)
        return names[which % len(names)] if names else None

    @rule(key=st.sampled_from([b"0", b"1"]))
    def reset(self, key):
        """What is stored from now on has another meaning, even under a key used before."""
        self.manager.reset(key)
        self.epoch += 1
        assert self.manager.num_cached_blocks == 0

    def release(self, name):
        self.prompts.append(self.running.pop(name).tokens)
        self.manager.release(name)

    def free_and_tables(self):
        tables = {
            name: [len(self.manager.block_table(name, g.index)) for g in self.layout.groups]
            for name in self.running
        }
        return self.manager.num_free_blocks, tables

    def store(self, name, start, stop):
        """Write what a step writes: for each new position, the prefix that ends there."""
        state = self.running[name]
        for group in self.layout.groups:
            table = self.manager.block_table(name, group.index)
            for position in range(start, stop):
                slot = table[position // BLOCK] * BLOCK + position % BLOCK
                assert 0 <= slot < self.num_blocks * group.block_tokens
                # A block in another group's hands has lost what it held in this one's.
                block = slot // group.block_tokens
                for other in self.layout.groups:
                    if other.index != group.index:
                        for lost in range(other.block_tokens):
                            self.shadow[other.index].pop(block * other.block_tokens + lost, None)
                self.shadow[group.index][slot] = (state.epoch, *state.tokens[: position + 1])

    def check_visible(self, name, stop, *, query):
        """Every stored key before ``stop`` that a query at position ``query`` sees is its own."""
        state = self.running[name]
        for group in self.layout.groups:
            table = self.manager.block_table(name, group.index)
            first = 0 if group.window is None else max(0, query - group.window + 1)
            for position in range(first, stop):
                slot = table[position // BLOCK] * BLOCK + position % BLOCK
                stored = self.shadow[group.index].get(slot)
                assert stored == (state.epoch, *state.tokens[: position + 1])

    @invariant()
    def consistent(self):
        if not hasattr(self, "manager"):
            return
        self.manager.check_invariants()
        for name, state in self.running.items():
            self.check_visible(name, state.computed, query=state.computed)
        if not self.running:
            assert self.manager.num_free_blocks == self.num_blocks
            assert self.manager.usage() == 0


CacheMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestCacheManager = CacheMachine.TestCase
