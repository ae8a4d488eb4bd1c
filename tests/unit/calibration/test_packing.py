"""The packing rule: nothing padded, nothing lost, nothing too long, and always the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv8.calibration.packing import BLOCK_TOKENS, Joints, check_limits, digest, pack
from kv8.errors import RequestError

BEGIN, END = 1, 2
TEXTS = st.lists(st.lists(st.integers(10, 99), max_size=60), max_size=12)
JOINTS = st.sampled_from([Joints(), Joints((BEGIN,)), Joints((BEGIN, BEGIN + 2), (END,))])


def _stream(texts: list[list[int]], joints: Joints) -> list[int]:
    return [t for text in texts for t in (*joints.begin, *text, *joints.end)]


@given(TEXTS, JOINTS, st.integers(1, 9), st.integers(BLOCK_TOKENS, 40))
def test_samples_hold_the_stream_and_only_begin_tokens_besides(texts, joints, samples, max_length):
    stream = _stream(texts, joints)
    if len(stream) < BLOCK_TOKENS:
        with pytest.raises(RequestError, match=f"{len(stream)} tokens in all.*less than one block"):
            pack([stream], joints, samples=samples, max_length=max_length, name="x.txt")
        return
    packed = pack([stream], joints, samples=samples, max_length=max_length, name="x.txt")

    assert 1 <= len(packed) <= samples
    assert all(1 <= len(sample) <= max_length for sample in packed)
    assert all(sample[: len(joints.begin)] == joints.begin for sample in packed)
    # Whatever was put in front is the begin tokens: taking it away again gives the stream back.
    position = 0
    for sample in packed:
        own = stream[position : position + len(sample)]
        if list(sample) != own:
            sample = sample[len(joints.begin) :]
            own = stream[position : position + len(sample)]
        assert list(sample) == own
        position += len(sample)
    room = max_length - len(joints.begin)
    assert position == min(len(stream), samples * room)


@given(TEXTS, st.integers(1, 9), st.integers(BLOCK_TOKENS, 40), st.randoms())
def test_how_the_stream_comes_in_pieces_makes_no_difference(texts, samples, max_length, draw):
    stream = _stream([*texts, list(range(20))], Joints((BEGIN,), (END,)))
    cuts = sorted(draw.choices(range(len(stream) + 1), k=5))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    settings = {"samples": samples, "max_length": max_length, "name": ""}
    whole = pack([stream], Joints((BEGIN,), (END,)), **settings)
    assert pack(pieces, Joints((BEGIN,), (END,)), **settings) == whole


@pytest.mark.parametrize(
    ("tokens", "lengths"),
    [
        (15 + 1, [16]),  # one block: one sample
        (63, [21, 21, 21]),
        (64, [16] * 4),  # four blocks: four samples, so that one can be held out
        (100, [25] * 4),
        (160, [40] * 4),
        (161, [32, 32, 32, 32, 33]),  # five of at most 40, and no rest of one token
        (1000, [40] * 8),  # all that eight samples hold
    ],
)
def test_samples_are_of_equal_length(tokens, lengths):
    packed = pack([range(tokens)], Joints(), samples=8, max_length=40, name="x")
    assert [len(sample) for sample in packed] == lengths


def test_no_more_is_read_than_the_samples_hold():
    def pieces():
        yield range(100)
        raise AssertionError("read on")

    assert len(pack(pieces(), Joints(), samples=2, max_length=50, name="x")) == 2


def test_one_sample_of_one_block_is_enough_to_ask_for():
    """Even where a begin token takes one place of it."""
    pieces = [range(5, 20), range(20, 99)]
    packed = pack(pieces, Joints((1,)), samples=1, max_length=16, name="x")
    assert packed == ((1, *range(5, 20)),)


def test_fewer_samples_than_four_if_fewer_were_asked_for():
    assert len(pack([range(100)], Joints(), samples=2, max_length=100, name="x")) == 2


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((0, 64), "samples must be a whole number of at least 1, got 0"),
        ((True, 64), "samples must be .* got True"),
        ((8, 15), "max_length must be a whole number of at least 16, got 15"),
        ((8, 64.0), "max_length must be .* got 64.0"),
    ],
)
def test_limits_are_checked(limits, message):
    with pytest.raises(RequestError, match=message):
        check_limits(*limits)


def test_the_digest_tells_tokens_order_and_lengths_apart():
    found = {digest(x) for x in ([[1, 2], [3]], [[1], [2, 3]], [[3], [1, 2]], [[1, 2, 3]], [])}
    assert len(found) == 5
    assert digest([(1, 2), (3,)]) == digest([[1, 2], [3]])
