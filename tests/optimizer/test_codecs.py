"""Formats of state below FP32: exactness, rounding, and values that come back bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megafp8.optimizer import codecs
from megafp8.optimizer.stored import Stored

CPU = torch.device("cpu")
TABLE = codecs.decoding_table(CPU)


def blocks(seed, spread, count=40):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count * 64, generator=generator) * torch.exp(spread * torch.randn(count * 64, generator=generator))
    x[:: 7 + seed % 5] = 0
    return x


def random_bits(x, seed=0):
    return torch.randint(0, 1 << 16, (x.numel(),), generator=torch.Generator().manual_seed(seed))


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_masters_come_back_exactly(bits):
    """Every finite FP32 number but the largest, whose weight would be infinite."""
    master = torch.tensor([bits if bits < 2**31 else bits - 2**32], dtype=torch.int32).view(torch.float32)
    weight, remainder = codecs.split_master(master)
    if master.isfinite() and master.abs() < 3.38e38:
        assert torch.equal(codecs.join_master(weight, remainder).view(torch.int32), master.view(torch.int32))
        assert (weight.float() - master).abs() <= 2**-8 * master.abs() + 1e-40


def test_weights_beside_remainders_are_rounded_half_up():
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8])  # halfway between two BF16 numbers
    assert torch.equal(codecs.split_master(ties)[0].float(), torch.tensor([1 + 2**-7, 1 + 2**-6, -1 - 2**-7]))
    assert torch.equal(ties.bfloat16().float(), torch.tensor([1.0, 1 + 2**-6, -1.0]))  # half to even


def test_bf16_is_rounded_to_a_neighbour_and_right_on_average():
    x = torch.full((1 << 16,), 1 + 2**-9)  # a quarter of the way to the next BF16 number
    rounded = codecs.round_to_bf16(x, torch.arange(1 << 16)).float()
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
    assert rounded.double().mean() == 1 + 2**-9


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0, 3.0, 8.0])
def test_fp8_blocks_come_back_bit_for_bit(spread, keep):
    for seed in range(4):
        x = blocks(seed, spread)
        encoded = codecs.encode_fp8(x, random_bits(x, seed), keep=keep)
        values = codecs.decode_fp8(*encoded, TABLE)
        again = codecs.decode_fp8(*codecs.restore_fp8(values, TABLE, keep=keep), TABLE)
        assert torch.equal(again.view(torch.int32), values.view(torch.int32))
        assert torch.equal(values.view(-1, 64).abs().amax(1), x.view(-1, 64).abs().amax(1))
        assert not values[x == 0].any()
        assert not keep or values[x != 0].all()


def test_second_moments_come_back_bit_for_bit():
    for seed in range(4):
        stored, again = (Stored.zeros("fp8", 64 * 40, CPU, root=True) for _ in range(2))
        x = blocks(seed, 2.0) ** 2
        stored.write(x, random_bits(x, seed))
        again.write(stored.read())
        assert torch.equal(again.read().view(torch.int32), stored.read().view(torch.int32))


@pytest.mark.parametrize(("spread", "error"), [(0.0, 2**-6), (1.0, 2**-4.5), (3.0, 2**-3.9)])
def test_the_range_that_a_block_needs_costs_precision(spread, error):
    """The narrower a block, the larger the expansion, and the smaller the error."""
    x = 1 + torch.rand(6400, generator=torch.Generator().manual_seed(0)) * 0.5
    x = x * torch.exp(spread * torch.randn(6400, generator=torch.Generator().manual_seed(1)))
    values = codecs.decode_fp8(*codecs.encode_fp8(x, None, keep=True), TABLE)
    assert ((values - x).abs() / x).median() < error


def test_stochastic_rounding_of_fp8_is_right_on_average():
    """Without it, a moment whose change is below half a step would stand still (beta2 0.999 moves it by 0.1 %)."""
    x = torch.full((1 << 16,), 1.9)
    x[::64] = 448.0  # the blocks' scale, which makes the grid at 1.9 one of 1/8
    x[1::64] = 2**-6
    rounded = codecs.decode_fp8(*codecs.encode_fp8(x, random_bits(x), keep=False), TABLE).view(-1, 64)[:, 2:]
    assert len(rounded.unique()) == 2
    assert rounded.double().mean().item() == pytest.approx(1.9, rel=2e-3)
    nearest = codecs.decode_fp8(*codecs.encode_fp8(x, None, keep=False), TABLE).view(-1, 64)[:, 2:]
    assert nearest.double().mean().item() != pytest.approx(1.9, rel=2e-3)


def test_tiny_and_zero_blocks():
    x = torch.cat([torch.zeros(64), torch.full((64,), 1e-40), torch.full((64,), 1e-37)])
    values = codecs.decode_fp8(*codecs.encode_fp8(x, None, keep=True), TABLE)
    assert torch.equal(values[:128], torch.zeros(128))
    torch.testing.assert_close(values[128:], x[128:], rtol=1e-6, atol=0)


def test_random_words_look_random_and_depend_on_everything():
    index = torch.arange(1 << 14)
    words = codecs.random_words(index, codecs.key_of(1, "a"), torch.tensor(5))
    assert words.min() >= 0
    assert words.max() < 2**32
    assert len(words.unique()) > (1 << 14) - 10
    for half in (words & 0xFFFF, words >> 16):
        assert half.double().mean().item() == pytest.approx(32767.5, rel=0.02)
    for other in (codecs.key_of(2, "a"), codecs.key_of(1, "b")):
        assert (codecs.random_words(index, other, torch.tensor(5)) != words).float().mean() > 0.99
    assert (codecs.random_words(index, codecs.key_of(1, "a"), torch.tensor(6)) != words).float().mean() > 0.99
