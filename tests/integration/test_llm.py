"""`LLM`: every way to give a prompt, what is refused, and that nothing stays behind."""

import itertools
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.tiny_models import VOCAB, prompt_ids

from kv8 import LLM, SamplingParams
from kv8.errors import CapacityError, ModelError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def llm(tiny_model) -> LLM:
    return LLM(tiny_model(), kv_cache_dtype="fp8", kv_cache_memory="1MiB", max_model_len=128)


def run(llm: LLM, prompts, params=GREEDY, **options):
    return llm.generate(prompts, params, use_tqdm=False, **options)


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_every_form_of_one_prompt_means_the_same(llm: LLM) -> None:
    text = "hello"
    ids = llm.get_tokenizer().encode(text)
    forms = [
        text,
        [text],
        ids,
        [ids],
        tuple(ids),
        np.array(ids),
        torch.tensor(ids),
        {"prompt": text},
        [{"prompt": text}],
        {"prompt_token_ids": ids},
        {"prompt": text, "prompt_token_ids": ids},
    ]
    results = [run(llm, form) for form in forms]
    assert all(len(result) == 1 for result in results)
    assert {str(tokens(result)) for result in results} == {str(tokens(results[0]))}
    assert results[0][0].prompt == text
    assert results[2][0].prompt is None
    assert results[10][0].prompt == text
    assert results[0][0].prompt_token_ids == ids


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [prompt_ids(5 + 7 * (i % 3), seed=i) for i in range(9)]
    params = [replace(GREEDY, max_tokens=1 + (3 * i) % 7) for i in range(9)]
    together = run(llm, prompts, params)
    assert [o.prompt_token_ids for o in together] == prompts
    assert [len(o.outputs[0].token_ids) for o in together] == [p.max_tokens for p in params]
    assert tokens(together) == [
        tokens(run(llm, p, q))[0] for p, q in zip(prompts, params, strict=True)
    ]


def test_a_mixed_list_is_fine(llm: LLM) -> None:
    ids = prompt_ids(4)
    assert len(run(llm, ["a", ids, {"prompt": "b"}, {"prompt_token_ids": ids}])) == 4
    assert run(llm, []) == []


def test_several_completions_of_a_prompt(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=8)
    [first], [again] = run(llm, "abc", params), run(llm, "abc", params)
    assert [o.index for o in first.outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in first.outputs}) == 3
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in again.outputs]
    single = run(llm, "abc", replace(params, n=1))
    assert tokens(single)[0] == first.outputs[0].token_ids


def test_a_seed_decides_alone_whatever_runs_beside_it(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=8)
    alone = tokens(run(llm, "seeded", params))[0]
    others = [SamplingParams(temperature=1.0, max_tokens=8)] * 5
    beside = run(llm, ["seeded", *"abcde"], [params, *others])
    assert tokens(beside)[0] == alone


def test_sampling_goes_on_after_a_preemption_as_if_nothing_had_happened(tiny_model) -> None:
    prompts = [prompt_ids(30, seed=i) for i in range(4)]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True)
    fp8 = {"kv_cache_dtype": "fp8"}
    with (
        LLM(tiny_model(), kv_cache_memory="1MiB", **fp8) as roomy,
        LLM(tiny_model(), kv_cache_memory="48KiB", max_model_len=80, **fp8) as tight,
    ):
        expected = tokens(run(roomy, prompts, params))
        assert tokens(run(tight, prompts, params)) == expected
        assert tight.engine.num_preemptions > 0
        assert_idle(tight)


def test_logprobs_of_prompt_and_output(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)
    [output] = run(llm, "abcd", params)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token, entries in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert entries is not None
        assert token in entries
    completion = output.outputs[0]
    assert completion.logprobs is not None
    chosen = [e[t] for e, t in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert [entry.rank for entry in chosen] == [1, 1, 1]
    assert completion.cumulative_logprob == pytest.approx(sum(e.logprob for e in chosen))


def test_a_repeat_reports_cached_tokens(llm: LLM) -> None:
    ids = prompt_ids(40, seed=77)
    [first], [again] = run(llm, ids), run(llm, ids)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 32)
    assert tokens([first]) == tokens([again])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "Prompt 0 is empty"),
        (["a", ""], "Prompt 1 is empty"),
        ([[]], "Prompt 0 is empty"),
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt": ""}, "empty"),
        ({"text": "a"}, "keys text; allowed are prompt and prompt_token_ids"),
        ({"prompt": "a", "images": []}, "images"),
        ({}, "none"),
        (5, "must be a prompt"),
        ([5.5], "Prompt 0"),
        ([None], "Prompt 0 must be text"),
        ([[1, "a"]], "Prompt 0 holds something that is no token number"),
        ([1, "a"], "Prompt 0"),
        ([[VOCAB]], f"Prompt 0: .*token {VOCAB}.*0 to {VOCAB - 1}"),
        ([["a"]], "no token number"),
        ([-1], "token -1"),
        (b"text", "must be a prompt"),
        ([b"text"], "Prompt 0 must be text"),
        ([5, True], "Prompt 0 holds something that is no token number"),
        (["a", "\udc80"], "Prompt 1 holds bytes that are no text in UTF-8"),
    ],
)
def test_what_is_no_prompt_is_refused_by_number(llm: LLM, prompts, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        run(llm, prompts)
    assert_idle(llm)


def test_a_prompt_too_long_is_refused_with_lengths(llm: LLM) -> None:
    """Pitfall 62: the length the message names works, one more does not."""
    with pytest.raises(CapacityError, match=r"Prompt 1.*128 tokens.*127 tokens or less fits"):
        run(llm, ["fine", prompt_ids(128)])
    assert_idle(llm)
    [output] = run(llm, prompt_ids(127))
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("params", [{"temperature": 0}, [GREEDY, GREEDY], ["no"], "no", 5, {5}])
def test_parameters_that_do_not_fit_are_refused(llm: LLM, params) -> None:
    with pytest.raises(RequestError, match="sampling_params"):
        run(llm, "one prompt", params)


def test_an_unknown_option_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"'kv_cache_dtypes'.*Did you mean kv_cache_dtype\b"):
        LLM(str(tmp_path), kv_cache_dtypes="fp8")
    with pytest.raises(RequestError, match=r"'tensor_parallel_size'.*Options: model, tokenizer"):
        LLM(str(tmp_path), tensor_parallel_size=2)


def test_an_interrupt_leaves_nothing_behind(llm: LLM, monkeypatch) -> None:
    steps = 0
    step = llm.engine.step

    def interrupted():
        nonlocal steps
        steps += 1
        if steps == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(llm, [prompt_ids(30, seed=i) for i in range(4)], replace(GREEDY, max_tokens=50))
    monkeypatch.undo()
    assert_idle(llm)
    assert len(run(llm, "and on it goes")) == 1


def test_a_stream_grows_and_can_be_broken_off(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    whole = llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text
    texts = [output.outputs[0].text for output in llm.stream_chat(messages, params)]
    assert texts[-1] == whole
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    with pytest.raises(RequestError, match="one conversation, got 2"):
        next(llm.stream_chat([messages, messages], params))  # type: ignore[list-item]
    broken = llm.stream_chat(messages, params)
    next(broken)
    broken.close()
    assert_idle(llm)


def test_chat_is_generate_over_the_template(llm: LLM) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    written = "<bos>[system] be brief\n[user] hi\n[assistant] "
    ids = llm.get_tokenizer().encode(written, add_special_tokens=False)
    [answer] = llm.chat(messages, GREEDY, use_tqdm=False)
    assert answer.prompt_token_ids == ids
    assert answer.prompt_token_ids.count(llm.get_tokenizer().bos_token_id) == 1
    assert tokens([answer]) == tokens(run(llm, ids))
    several = llm.chat([messages, messages[1:]], GREEDY, use_tqdm=False)
    assert tokens(several[:1]) == tokens([answer])
    [unprompted] = llm.chat(messages, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert unprompted.prompt == written.removesuffix("[assistant] ")
    [other] = llm.chat(messages, GREEDY, use_tqdm=False, chat_template="{{ messages[1].content }}")
    assert other.prompt == "hi"


@pytest.mark.parametrize(
    ("messages", "template", "message"),
    [
        ([], None, "list of"),
        ("hi", None, "list of"),
        ([[]], None, "at least one message"),
        ([{"content": "hi"}], None, "role and content"),
        (["hi"], None, "at least one message"),
        ([{"role": "user", "content": "a"}], "{{ raise_exception('no users') }}", "no users"),
        ([{"role": "user", "content": "a"}], "{{ oh no", "refuses the messages"),
        ([{"role": "user", "content": None}], None, "content must be text.*None"),
        ([{"role": "user", "content": 5}], None, "content must be text.*5"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}], None, "image"),
        ([{"role": "user", "content": [{"type": "text"}]}], None, "content must be text"),
        ([{"role": "user", "content": "\udc80"}], None, "Conversation 0 holds bytes"),
    ],
)
def test_what_is_no_conversation_is_refused(llm: LLM, messages, template, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat(messages, GREEDY, use_tqdm=False, chat_template=template)


def test_content_in_parts_is_read_as_text(llm: LLM) -> None:
    """A template that expects text would write the list as Python spells it."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    called = {"role": "assistant", "content": None, "tool_calls": []}
    [output] = llm.chat(
        [{"role": "user", "content": parts}, called],
        GREEDY,
        use_tqdm=False,
        chat_template="{% for m in messages %}<{{ m.content }}>{% endfor %}",
    )
    assert output.prompt == "<one\ntwo><>"


def test_a_model_is_named_by_text_or_path(tiny_model) -> None:
    folder = tiny_model()
    for model in (folder, str(folder)):
        LLM(model, tokenizer=folder, kv_cache_memory="1MiB").close()
    with pytest.raises(RequestError, match="model is missing"):
        LLM(None)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"model must be text, got 5\."):
        LLM(5)  # type: ignore[arg-type]


def test_no_template_is_said(llm: LLM, monkeypatch) -> None:
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", None)
    with pytest.raises(RequestError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)


def test_the_progress_bar_goes_to_stderr(llm: LLM, capsys) -> None:
    llm.generate(["a", "b"], GREEDY)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2/2" in captured.err
    assert "12 tokens" in captured.err
    run(llm, "a")
    assert capsys.readouterr().err == ""


def test_the_tokenizer_may_come_from_elsewhere(tiny_model, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model(), folder, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ModelError, match="holds no tokenizer"):
        LLM(folder, kv_cache_memory="1MiB")
    with LLM(folder, tokenizer=str(tiny_model()), kv_cache_memory="1MiB") as llm:
        assert run(llm, "abc")[0].prompt_token_ids == llm.get_tokenizer().encode("abc")


def test_closing_frees_and_says_so(tiny_model) -> None:
    with LLM(tiny_model(), kv_cache_memory="1MiB") as llm:
        assert len(run(llm, "a")) == 1
    with pytest.raises(RequestError, match="closed"):
        run(llm, "a")
    llm.close()


def test_the_report_counts_what_was_stored(llm: LLM) -> None:
    before = llm.kv_cache_report().layers[0].k_counts
    [output] = run(llm, prompt_ids(21, seed=99), SamplingParams(temperature=0, max_tokens=4))
    after = llm.kv_cache_report().layers[0].k_counts
    assert before is not None
    assert after is not None
    # The last token is never stored: nothing was computed after it.
    num_tokens = 21 + len(output.outputs[0].token_ids) - 1
    assert after.stored - before.stored == num_tokens * 2 * 16


def test_the_report_names_what_the_tensors_are(llm: LLM, monkeypatch) -> None:
    """Pitfall 63: dtype and bytes are those of the allocated tensors, not of the request."""
    report = llm.kv_cache_report()
    assert {layer.dtype for layer in report.layers} == {"fp8_e4m3"}
    assert report.storage_bytes == llm.engine.runner.pool.storage_bytes
    assert sum(layer.bytes_per_token for layer in report.layers) == 4 * 2 * 2 * 16
    layer = llm.engine.runner.layers[2]
    wide = replace(layer, k_codes=layer.k_codes.to(torch.bfloat16))
    monkeypatch.setitem(llm.engine.runner.layers, 2, wide)
    assert [x.dtype for x in llm.kv_cache_report().layers][1:3] == ["fp8_e4m3", "bfloat16"]


def test_half_the_bytes(tiny_model) -> None:
    """Pitfall 63: an FP8 cache takes half of a 16-bit one, measured on the tensors."""
    sizes = {}
    for dtype in ("bfloat16", "fp8", "fp8_e5m2"):
        with LLM(
            tiny_model(), dtype="bfloat16", kv_cache_dtype=dtype, kv_cache_memory="1MiB"
        ) as llm:
            report = llm.kv_cache_report()
            sizes[dtype] = sum(layer.bytes_per_token for layer in report.layers)
            assert report.capacity.tokens == 2**20 // (sizes[dtype] * 16) * 16
    assert sizes["fp8"] * 2 == sizes["fp8_e5m2"] * 2 == sizes["bfloat16"]


def test_an_uncalibrated_cache_shows_from_outside(llm: LLM, tiny_model) -> None:
    """Pitfall 41: dtype, calibrated or not, and the share that was clipped, in one place."""
    brief = llm.kv_cache_report().brief()
    assert brief["dtypes"] == {"fp8_e4m3": 4}
    assert brief["calibrated"] is False
    assert 0 <= brief["saturated_share"] < 1
    scales = {layer: {"k": 0.5, "v": 0.25} for layer in range(4)}
    with LLM(tiny_model(), kv_cache_dtype="fp8", kv_cache_memory="1MiB", kv_scales=scales) as other:
        assert other.kv_cache_report().calibrated is True
    with LLM(tiny_model(), kv_cache_memory="1MiB") as plain:
        assert plain.kv_cache_report().calibrated is None


def test_new_scales_show_and_stale_ones_are_not_called_calibrated(tiny_model) -> None:
    """Pitfall 47: the report follows the scales in use and says when the weights left them."""
    first, second = ({i: {"k": k, "v": k} for i in range(4)} for k in (0.5, 0.25))
    options = {"kv_cache_dtype": "fp8", "kv_cache_memory": "1MiB"}
    with LLM(tiny_model(), kv_scales=first, **options) as llm:
        llm.engine.set_scales(second)
        report = llm.kv_cache_report()
        assert {layer.k.values for layer in report.layers if layer.k} == {(0.25,)}
        assert (report.calibrated, report.stale) == (True, False)
        llm.engine.update_weights({})
        report = llm.kv_cache_report()
        assert (report.calibrated, report.stale) == (False, True)


def test_a_16_bit_cache_has_no_scales_to_show(tiny_model, caplog) -> None:
    """Pitfall 12: not in the log, not in the report."""
    with (
        caplog.at_level(logging.INFO, logger="kv8"),
        LLM(tiny_model(), kv_cache_memory="1MiB") as llm,
    ):
        report = llm.kv_cache_report()
        assert all(layer.scale(side) is None for layer in report.layers for side in "qkv")
        assert "scale" not in str(report)
    assert "scale" not in caplog.text.lower()


def test_two_models_at_once_do_not_meet(tiny_model) -> None:
    folder = tiny_model()
    with (
        LLM(folder, kv_cache_dtype="fp8", kv_cache_memory="1MiB") as one,
        LLM(folder, kv_cache_memory="1MiB") as other,
    ):
        ids = prompt_ids(20)
        before = tokens(run(one, ids))
        run(other, prompt_ids(20, seed=1))
        assert tokens(run(one, ids)) == before
        assert other.kv_cache_report().layers[0].k_counts is None


def assert_idle(llm: LLM) -> None:
    engine = llm.engine
    assert not engine.has_unfinished
    assert engine.cache.num_free_blocks == engine.cache.num_blocks
    engine.check_invariants()
