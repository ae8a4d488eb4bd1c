"""What a cache of some memory would hold under each dtype and skip list. Reads no weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kv8.cache.capacity import Capacity, capacity
from kv8.cache.gain import CapacityGain, capacity_gain
from kv8.cache.layout import CacheLayout, make_layout
from kv8.engine.devices import choose_block_size, resolve_device
from kv8.engine.resolve_length import check_max_model_len
from kv8.formats.base import ALIASES, FORMATS, FP8_E4M3, FP8_E5M2
from kv8.geometry import ModelGeometry
from kv8.layer_plan import make_layer_plan, resolve_cache_format
from kv8.models.config import load_config
from kv8.models.geometry import read_geometry
from kv8.models.source import resolve_source
from kv8.options import EngineOptions
from kv8.scales.checkpoint import read_checkpoint


@dataclass(frozen=True)
class PlanRow:
    """One setting and what it gives.

    Attributes:
        setting: dtype, and the skip list if it has one.
        dtype: the cache's format.
        skip: the skip list's entries.
        chosen: whether this is what an engine with these options would have.
        capacity: what the memory holds.
        gain: tokens over those of the model's dtype.
        saving: where that comes from: bytes of one sequence of ``capacity.max_model_len`` tokens,
            window by window.
        note: what limits the gain, or is short, in a sentence; often empty.
    """

    setting: str
    dtype: str
    skip: tuple[str, ...]
    chosen: bool
    capacity: Capacity
    gain: float
    saving: CapacityGain
    note: str

    def as_json(self) -> dict[str, Any]:
        """Return the row as plain data."""
        held = self.capacity
        return {
            "setting": self.setting,
            "dtype": self.dtype,
            "skip": list(self.skip),
            "bytes_per_token": held.bytes_per_token,
            "tokens": held.tokens,
            "max_concurrency": held.max_concurrency,
            "max_model_len": held.max_model_len,
            "longest_sequence": held.longest_sequence,
            "num_blocks": held.num_blocks,
            "block_size": held.block_size,
            "block_bytes": held.block_bytes,
            "padding_bytes": held.padding_bytes,
            "scale_bytes": held.scale_bytes,
            "memory_bytes": held.memory_bytes,
            "gain": self.gain,
            "saving": [vars(each) | {"ratio": each.ratio} for each in self.saving.classes],
            "chosen": self.chosen,
            "note": self.note,
        }


def plan_rows(options: EngineOptions, memory_bytes: int) -> list[PlanRow]:
    """Return a row for the model's dtype and each FP8 format, with and without the skip list.

    Args:
        options: model, dtype, skip list, block size, longest sequence and step size count. With a
            ``kv_cache_dtype``, only its rows and the model's dtype are given.
        memory_bytes: memory for the cache.

    Raises:
        RequestError: the model, the skip list or the longest sequence cannot be served.
    """
    source = resolve_source(options.model)
    geometry = read_geometry(load_config(source.folder))
    check_max_model_len(options.max_model_len, geometry.max_position)
    if options.dtype != "auto":
        geometry = replace(geometry, model_dtype=options.dtype)
    declaration = read_checkpoint(source.folder, geometry).declaration
    chosen, _ = resolve_cache_format(options.kv_cache_dtype, declaration, geometry.model_dtype)
    skip = options.skip_layers
    make_layer_plan(geometry, chosen, skip)  # refuses a wrong entry, also where none has an effect
    base = _hold(options, geometry, geometry.model_dtype, (), memory_bytes)
    rows = []
    for dtype in _dtypes(options, geometry):
        plain = dtype == geometry.model_dtype  # then there is nothing to leave out
        lists = [(), skip] if skip and not plain else [()]
        for entries in lists:
            layout, held = _hold(options, geometry, dtype, entries, memory_bytes)
            gain = held.tokens / base[1].tokens if base[1].tokens else 0.0
            saving = capacity_gain(geometry, layout, held.max_model_len)
            rows.append(
                PlanRow(
                    setting=dtype + (f", skip {' '.join(entries)}" if entries else ""),
                    dtype=dtype,
                    skip=tuple(entries),
                    chosen=dtype == chosen.name and (plain or entries == skip),
                    capacity=held,
                    gain=gain,
                    saving=saving,
                    note=_note(layout, held, saving),
                )
            )
    return rows


def _dtypes(options: EngineOptions, geometry: ModelGeometry) -> list[str]:
    asked = ALIASES.get(options.kv_cache_dtype, options.kv_cache_dtype)
    others = [FP8_E4M3.name, FP8_E5M2.name] if asked == "auto" else [asked]
    return list(dict.fromkeys([geometry.model_dtype, *others]))


def _hold(
    options: EngineOptions,
    geometry: ModelGeometry,
    dtype: str,
    skip: Sequence[str],
    memory_bytes: int,
) -> tuple[CacheLayout, Capacity]:
    plan = make_layer_plan(geometry, FORMATS[dtype], skip)
    block_size = choose_block_size(options.block_size, resolve_device(options.device)[0])
    layout = make_layout(geometry, plan, block_size, max_chunk=options.max_num_batched_tokens)
    longest = options.max_model_len or geometry.max_position
    return layout, capacity(layout, memory_bytes, longest)


def _note(layout: CacheLayout, held: Capacity, saving: CapacityGain) -> str:
    """Say what a reader would otherwise wonder about."""
    notes = []
    if not held.fits:
        notes.append(f"{held.max_model_len:,} tokens do not fit; {held.longest_sequence:,} do")
    if saving.limiting is not None:
        notes.append(f"limited by {saving.limiting}")
    if held.padding_bytes:
        share = held.padding_bytes / (len(layout.groups) * layout.block_bytes)
        notes.append(f"{100 * share:.2g} % of the blocks' bytes are padding")
    return "; ".join(notes)
