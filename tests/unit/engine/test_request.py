from tests.unit.engine.scheduling import make_request


def test_lengths_follow_from_the_tokens() -> None:
    request = make_request("a", 0, 5, max_tokens=2)
    assert (request.num_tokens, request.num_output_tokens, request.num_pending_tokens) == (5, 0, 5)
    request.num_computed_tokens = 5
    request.token_ids.append(9)
    assert (request.num_tokens, request.num_output_tokens, request.num_pending_tokens) == (6, 1, 1)
    assert not request.reached_max_tokens
    request.token_ids.append(9)
    assert request.reached_max_tokens
    assert request.max_total_tokens == 7


def test_a_follower_waits_while_its_leader_computes_the_prompt() -> None:
    leader = make_request("a", 0, 5)
    follower = make_request("a", 1, 5, prompt=0, leader=leader)
    assert not leader.follows_unready_leader
    assert follower.follows_unready_leader
    leader.num_computed_tokens = 5
    assert not follower.follows_unready_leader
