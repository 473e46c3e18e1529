"""`host_time`: when copies hide, against arithmetic by hand."""

from __future__ import annotations

import dataclasses

import pytest

from streamshard.errors import ConfigError
from streamshard.tools.host_time import MACHINES, Exchanged, HostBytes, Load, Machine, parse_rate, predict

P = 8_000_000_000
DENSE = HostBytes(trained=P, cast=2 * P, first_forward=0, forward=2 * P, backward=2 * P)
H100 = MACHINES["pcie5"]


def _load(tokens: int = 65536, micro_batches: int = 1, used: float = P, *, is_checkpointed: bool = False) -> Load:
    return Load(used, used, 0, 0, 1, tokens, micro_batches, is_checkpointed)


@pytest.mark.parametrize(
    ("machine", "ranks", "least", "most"),
    [("pcie5", 1, 64_000, 70_000), ("pcie5x8", 8, 13_000, 15_000), ("gh200", 1, 17_000, 19_000)],
)
def test_a_step_hides_beside_one_forward_from_so_many_tokens(machine: str, ranks: int, least: int, most: int) -> None:
    """16 bytes in over one H100's link, 30 in the host memory of 8 ranks, 30 in the host memory of a GH200."""
    own = P // ranks
    told = predict(HostBytes(own, 2 * own, 0, 2 * own, 2 * own), _load(), MACHINES[machine])
    assert least <= told.hidden_tokens <= most
    assert told.hidden_tokens == pytest.approx(told.passes[0].hidden_tokens, abs=1)


def test_bytes_are_those_of_the_design() -> None:
    """For each parameter: 16 in and 14 out with the step, weights 2, gradients 4 out, and 4 in to be added to."""
    passes = predict(DENSE, _load(micro_batches=3), H100).passes
    assert [(each.name, each.count, each.in_bytes / P, each.out_bytes / P) for each in passes] == [
        ("first forward", 1, 16, 14),
        ("first backward", 1, 2, 4),
        ("further forward", 2, 2, 0),
        ("further backward", 2, 6, 4),
    ]


def test_flops_are_6_or_8_per_parameter_and_token_and_causal_attention() -> None:
    """Frozen parameters have no gradient: 4 or 6."""
    for frozen, is_checkpointed, each in ((0, False, 6), (0, True, 8), (P, False, 4), (P, True, 6)):
        load = Load(P, P - frozen, 0, 0, 1, 4096, is_checkpointed=is_checkpointed)
        assert load.forward_flops + load.backward_flops == each * P
    # Two matmuls of 2 FLOPs for each of 4096 / 2 earlier tokens, 128 channels and 3 layers; twice more in backward.
    load = Load(0, 0, 3, 128, 1, 4096)
    assert (load.forward_flops, load.backward_flops) == (2 * 2 * 2048 * 128 * 3, 2 * 2 * 2 * 2048 * 128 * 3)


def test_micro_batches_that_run_layer_by_layer_hide_a_step() -> None:
    """As one that is as large; in a loop they do not. The limit is one of tokens in a step, between ranks too."""
    for inputs in (DENSE, Exchanged(2 * P, 2 * P, 4 * P, keeps_weights=False, keeps_grads=False)):
        loop = predict(inputs, _load(4096, 8), H100)
        ours = predict(inputs, dataclasses.replace(loop.load, is_layer_major=True), H100)
        large = predict(inputs, _load(8 * 4096), H100)
        assert inputs is not DENSE or loop.advice[0].startswith("larger micro-batches rather than more")
        assert (ours.passes, ours.step_s) == (large.passes, large.step_s)
        assert ours.computing_s == pytest.approx(loop.computing_s) and loop.step_s > 1.2 * ours.step_s
        assert f"all copies hide from {ours.hidden_tokens:,} tokens in a step" in str(ours)


@pytest.mark.parametrize(
    ("change", "limit"),
    [
        ({}, "link in"),
        ({"host_memory": 60e9}, "host memory"),
        ({"ranks": 4}, "host memory"),
        ({"flops": 1e12}, "computing"),
    ],
)
def test_the_slowest_is_the_limit(change: dict[str, float], limit: str) -> None:
    told = predict(DENSE, _load(16_384), dataclasses.replace(H100, **change))  # type: ignore[arg-type]
    assert told.limit == limit


def test_frozen_weights_only_come_in() -> None:
    """As with LoRA. Most bytes are weights, so fewer trained parameters would not help."""
    lora = HostBytes(P // 100, P // 50, 2 * P, 2 * P, 2 * P)
    told = predict(lora, _load(4096), H100)
    assert told.passes[0].in_bytes == 16 * P // 100 + 2 * P
    assert told.hidden_tokens < predict(DENSE, _load(4096), H100).hidden_tokens / 7
    assert told.advice == ["larger micro-batches", "more ranks: each has a link, and copies less"]


def test_rates_are_numbers_with_a_unit() -> None:
    assert parse_rate("link", "50GB/s", "B/s") == 50e9
    assert parse_rate("flops", "0.4P", "") == 400e12
    for text in ("50", "GB/s", "50GiB/s", "50GB"):
        with pytest.raises(ConfigError, match=f"link='{text}': wanted a number and GB/s, TB/s, PB/s"):
            parse_rate("link", text, "B/s")
    with pytest.raises(ConfigError, match="flops=0.0: wanted a positive number"):
        Machine(1.0, 1.0, 0.0)
