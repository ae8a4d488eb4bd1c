"""How GPU decode shares its programs among sequences: the rule alone, any lengths, any device."""

from hypothesis import given
from hypothesis import strategies as st

from kv8.kernels.triton_config import MAX_PARTS, Device, Shape, count_parts, decode_config

H200 = Device("hardware", True, 132, 227 * 1024)
LENGTHS = st.lists(st.integers(0, 5000) | st.integers(0, 40), min_size=1, max_size=70)


@given(tiles=LENGTHS, parts=st.integers(1, 1100), least=st.integers(1, 16))
def test_no_part_is_empty_and_none_much_longer_than_its_share(tiles, parts, least):
    counts = count_parts(tiles, parts, least)
    share = max(-(-sum(tiles) // parts), least)
    for length, count in zip(tiles, counts, strict=True):
        assert 1 <= count <= max(1, min(MAX_PARTS, length // least))
        longest = max(length * (p + 1) // count - length * p // count for p in range(count))
        assert longest < 2 * share or count == MAX_PARTS


@given(
    tiles=LENGTHS,
    num_kv_heads=st.sampled_from([1, 2, 8, 32]),
    head_dim=st.sampled_from([64, 128, 256]),
    code_bytes=st.sampled_from([1, 2]),
    spare=st.integers(0, 10_000),
)
def test_the_grid_has_a_program_for_every_part(tiles, num_kv_heads, head_dim, code_bytes, spare):
    """It is fixed before lengths are known, and is so for any."""
    config = decode_config(H200, Shape(num_kv_heads, 4, head_dim, code_bytes, 2))
    programs = config.programs(len(tiles), max(1, max(tiles)) * config.tile + spare)
    assert sum(count_parts(tiles, config.parts, config.least)) <= programs


def test_all_places_of_a_device_have_work_whatever_the_lengths():
    """Of 132 x 8 programs that fit at once: batches of one length, and a long one beside short."""
    config = decode_config(H200, Shape(8, 4, 128, 1, 2))
    for lengths in ([8192] * 64, [32_768] * 8, [131_072], [1024] * 63 + [131_072]):
        tiles = [length // config.tile for length in lengths]
        counts = count_parts(tiles, config.parts, config.least)
        assert sum(counts) >= 0.9 * 132, lengths
        longest = max(-(-n // count) for n, count in zip(tiles, counts, strict=True))
        assert longest <= 1.1 * sum(tiles) / 132, lengths
