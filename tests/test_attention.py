"""Attention by groups against one query head after another."""

import pytest
import torch

from tasks.attention import attend_in_training, causal_mask, grouped_attention, trains_by_matrices


@pytest.mark.parametrize(("heads", "groups"), [(9, 3), (4, 4), (6, 1)])
@pytest.mark.parametrize("width", [1, 5])
def test_every_query_head_reads_its_own_group(heads: int, groups: int, width: int) -> None:
    draw = torch.Generator().manual_seed(heads * width)
    query = torch.randn(2, heads, width, 8, generator=draw)
    key, value = (torch.randn(2, groups, 7, 8, generator=draw) for _ in range(2))
    seen = torch.rand(2, 1, width, 7, generator=draw) < 0.6
    seen[..., 0] = True
    found = grouped_attention(query, key, value, seen)
    for row in range(2):
        for head in range(heads):
            group = head // (heads // groups)
            scores = query[row, head] @ key[row, group].T / 8**0.5
            weights = scores.masked_fill(~seen[row, 0], float("-inf")).softmax(-1)
            torch.testing.assert_close(found[row, head], weights @ value[row, group], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
def test_matrix_products_give_the_attention_of_the_kernel(dtype: torch.dtype, tolerance: float) -> None:
    """A mask and shared key heads included; training in bfloat16 on a CPU takes them."""
    draw = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(2, heads, 6, 8, generator=draw).to(dtype) for heads in (6, 2, 2))
    assert trains_by_matrices(query) == (dtype == torch.bfloat16)
    seen = causal_mask(6, query.device)
    exact = grouped_attention(query.float(), key.float(), value.float(), seen)
    found, _ = attend_in_training(None, query, key, value, None)
    torch.testing.assert_close(found.transpose(1, 2).float(), exact, rtol=tolerance, atol=tolerance)
    found = grouped_attention(query, key, value, seen, by_matrices=True)
    torch.testing.assert_close(found.float(), exact, rtol=tolerance, atol=tolerance)
