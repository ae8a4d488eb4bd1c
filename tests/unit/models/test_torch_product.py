"""torch's products over few numbers of rows."""

import pytest
import torch

from kv8.models.torch_product import torch_product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 63, 64, 65, 130])
def test_it_is_the_product(dtype, with_bias, num_rows) -> None:
    draw = torch.Generator().manual_seed(num_rows)
    x, weight = (torch.randn(n, 32, generator=draw) for n in (num_rows, 24))
    bias = torch.randn(24, generator=draw) if with_bias else None
    out = torch.full((num_rows, 24), torch.nan, dtype=dtype)
    given = (x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    torch_product(*given, out)
    x, weight, bias = (None if t is None else t.double() for t in given)
    expected = x @ weight.T + (0 if bias is None else bias)
    # A sum of 33 products of about 1 in float32, then rounded to the type once.
    tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 33 * 16 * torch.finfo(torch.float32).eps}
    torch.testing.assert_close(out.double(), expected, **tolerance)


def test_the_numbers_of_rows_are_few(monkeypatch) -> None:
    seen = set()
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda x, w, out: (seen.add(len(x)), mm(x, w, out=out)))
    weight = torch.ones(2, 4, dtype=torch.bfloat16)
    for num_rows in range(1, 1030):
        x = torch.ones(num_rows, 4, dtype=torch.bfloat16)
        torch_product(x, weight, None, torch.empty(num_rows, 2, dtype=torch.bfloat16))
    assert seen == {16, 32, 48, *range(64, 1025, 64)}
