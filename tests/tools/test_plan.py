"""`plan` and the command ``streamshard plan``: what a run will need, as the live engine then reports it."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from streamshard import Precision, StreamShard, plan
from streamshard.comm.streams import Collective, Observer, StreamName
from streamshard.config import ReductionMode
from streamshard.errors import ConfigError, ShardingError
from streamshard.tools.activations import Activations, estimate_activations
from streamshard.tools.command import main
from streamshard.tools.fit import Stage
from streamshard.tools.host_time import MACHINES, Step
from streamshard.tools.model_source import builder_of
from tests.counts import engine_inside
from tests.faults import case
from tests.integrations.models import make_model
from tests.launched import ROOT
from tests.models import DIM, Layer, NormStack, Stack, TinyConfig, TinyLM, token_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import adamw, lm_step, mesh_2d, stack_step
from tests.scenarios import PRECISIONS, SCENARIOS, over_sockets
from tests.simulated import is_inside, simulated_device
from tests.test_meta_device import on_meta
from tests.tools.test_planner import half_frozen, no_activations

SLOTS: tuple[dict[str, Any], ...] = (
    {"weight_slots": 2},
    {"weight_slots": 3},
    {"weight_slots": "all"},
    {"weight_slots": "all", "grad_slots": "all"},
)
SOME = "large embedding and head", "two layers", "unequal layers", "a unit of another kind", "adapters", "norms in fp32"
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: SCENARIOS[name].build for name in SOME},
    "tied": lambda: TinyLM(TinyConfig(tied=True)),
    "batch norm": NormStack,
    "frozen": lambda: TinyLM().requires_grad_(False),
    "T5": lambda: make_model("t5"),  # with wishes of its own for fp32
}


def _assert_equal(planned: Stage, model: Any) -> None:
    engine_inside(model).predict_ends()  # or train two steps: see tests/core/test_ends.py
    report = model.memory_report()
    assert planned.memory == report
    assert planned.total_bytes == report.total_bytes + report.adam_bytes + report.chunk_bytes
    assert planned.host_total_bytes == report.host_total_bytes + report.host_adam_bytes


def _check(
    build: Callable[[], nn.Module], world_size: int, transport: str, mesh: DeviceMesh | None = None, **settings: Any
) -> list[tuple[Stage, Any]]:
    """At each number of slots, the plan of a model without values equals the report of the live one. Gives both."""
    replicas = 1 if mesh is None else mesh.size(0)
    planned = plan(build, world_size // replicas, transport=transport, replicas=replicas, weight_slots=3, **settings)
    names = ["ZeRO-3", "3 slots", "ZeRO-2", "ZeRO-1"][: 2 if "offload" in settings else 4]
    assert [stage.name for stage in planned.stages] == names
    models = [StreamShard(build(), mesh=mesh, **slots, **settings) for slots in SLOTS[: len(names)]]
    for stage, model in (both := list(zip(planned.stages, models, strict=True))):
        _assert_equal(stage, model)
        assert planned.numel == sum(param.numel() for param in model.parameters())
    return both


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "transport", "precision"),
    [
        (1, "shared-memory", "bf16"),
        (2, "shared-memory", "16-bit wire"),
        *((2, "nccl", precision) for precision in ("bf16", "16-bit wire", "16-bit")),
        (3, "sockets", "fp32"),
    ],
)
def test_a_plan_equals_the_live_memory_report(context: RankContext, transport: str, precision: str) -> None:
    """For every model (over NCCL) and number of slots, in each category, byte for byte."""
    way = {"sockets": over_sockets, "nccl": simulated_device}.get(transport, nullcontext)
    names = [*MODELS] if transport == "nccl" and precision == "bf16" else ["large embedding and head", "frozen"]
    with way():  # type: ignore[operator]  # each makes a context
        for name in names:
            _check(MODELS[name], context.world_size, transport, precision=PRECISIONS[precision])


@on_ranks(4)
@pytest.mark.parametrize(("transport", "in_order"), [("shared-memory", False), ("nccl", True)])
def test_a_plan_of_two_replicas_equals_the_live_report(context: RankContext, transport: str, in_order: bool) -> None:
    """Also in rank order, where main grads have memory beside "all" gradient slots, and cut over replicas too."""
    with simulated_device() if transport == "nccl" else nullcontext():
        mesh = mesh_2d(2, 2)
        for dtype in (torch.bfloat16, torch.float32):
            precision = Precision(param_dtype=dtype, grad_dtype=torch.float32, sums_in_rank_order=in_order)
            is_cut = in_order is (dtype is torch.float32)
            settings: dict[str, Any] = {"precision": precision, "shard_over_replicas": is_cut}
            _check(MODELS["tied"], context.world_size, transport, mesh, **settings)


@on_ranks()
@pytest.mark.parametrize(("world_size", "precision"), [(1, "bf16"), (2, "bf16"), (2, "16-bit wire")])
def test_a_plan_with_offload_equals_the_live_memory_report(context: RankContext, precision: str) -> None:
    """Bytes on the device and in host memory, of every category, and of a step's chunks; also with a device budget."""
    for number, name in enumerate(MODELS if precision == "bf16" else ("frozen", "adapters")):
        budget = (0, "24KB")[(number + context.world_size) % 2]
        with simulated_device() as device:
            given: dict[str, Any] = {"precision": PRECISIONS[precision], "offload": "state", "device_budget": budget}
            for stage, model in _check(MODELS[name], context.world_size, "nccl", **given):
                held = [buffer for _, buffer in engine_inside(model).ledger.buffers]
                pinned_bytes = sum(each.nbytes for each in held if is_inside(each, device.pinned))
                assert pinned_bytes == sum(stage.memory.host_bytes.values())


@on_ranks(2)
def test_a_plan_takes_the_arguments_of_streamshard(context: RankContext) -> None:
    """Units, resident modules, sizes of units, cuts and the wire's dtype. The model stays as it is."""
    model = TinyLM(TinyConfig(depth=6))
    before = dict(model.named_parameters())
    settings: dict[str, Any] = {
        "units": ["Block", "embedding"],
        "resident": ["blocks.1"],
        "min_unit_size": "16KiB",
        "align_pieces_to": 64,
        "precision": Precision(param_dtype=torch.float32, wire_dtype=torch.bfloat16),
    }
    planned = plan(model, 2, transport="shared-memory", **settings)
    assert type(model) is TinyLM
    assert all(param is before[name] for name, param in model.named_parameters())
    _assert_equal(planned.stages[0], StreamShard(model, **settings))
    with pytest.raises(ShardingError, match="already sharded"):
        plan(model, 2)


class Sent(Observer):
    """Counts the bytes that this rank sends for collectives of flat parameters that several ranks cut."""

    def __init__(self, model: Any) -> None:
        engine = engine_inside(model)
        flats = [flat for unit in engine.units for flat in unit.flat_params]
        self._sizes = {flat.tag: flat.ranks.world_size for flat in flats}
        self._transport, self.sent_bytes = engine.ranks.transport, 0

    def on_collective(self, stream: StreamName, collective: Collective, tag: Any, reads: Any, writes: Any) -> None:
        if collective is Collective.COPY:
            return
        whole = reads[0] if collective is Collective.REDUCE_SCATTER else writes[0]
        if (size := self._sizes.get(tag, 1)) > 1:
            is_gather = collective is Collective.ALL_GATHER
            dtype = whole.dtype if is_gather else self._transport.sent_dtype(ReductionMode.FP32, whole.dtype)
            self.sent_bytes += whole.numel() * dtype.itemsize * (size - 1) // size


def sent_in_last(model: Any, step: Callable[[], object], steps: int = 3) -> int:
    """In the last of these steps of training. From the second on, embedding and head take turns."""
    optimizer = adamw(model)
    for _ in range(steps):
        sent = Sent(model)
        with engine_inside(model).streams.observed_by(sent):
            step()
        optimizer.step()
        optimizer.zero_grad()
    return sent.sent_bytes


@on_ranks(2)
@pytest.mark.parametrize("settings", [{}, {"offload": "state"}])
def test_a_step_sends_what_the_plan_says(context: RankContext, settings: dict[str, Any]) -> None:
    models: tuple[tuple[Callable[[], nn.Module], Any], ...] = (
        (functools.partial(half_frozen, TinyConfig(depth=6)), lm_step),
        (lambda: TinyLM(TinyConfig(vocabulary=160, depth=6)), lm_step),
        (Stack, stack_step),
        (lambda: nn.Sequential(*(Layer(DIM) for _ in range(5))), stack_step),  # nothing in the root unit
    )
    all_slots = SLOTS[: 2 if settings else 4]
    transport = "nccl" if settings else "shared-memory"
    # Each model at one number of slots, and the first at all.
    cells = {(place, place % len(all_slots)) for place in range(len(models))}
    for model_number, number in sorted(cells | {(0, number) for number in range(len(all_slots))}):
        build, step = models[model_number]
        planned = plan(build, 2, weight_slots=3, transport=transport, **settings).stages[number]
        with simulated_device() if settings else nullcontext():
            model = StreamShard(build(), **all_slots[number], **settings)
        sent = sent_in_last(model, functools.partial(step, model, context.call(0)))
        assert sent == planned.sent_bytes


@on_ranks(2)
def test_a_step_of_accumulation_takes_and_sends_what_the_plan_says(context: RankContext) -> None:
    """Memory with the sums, and collectives. A loop sends what the plan says too, in ``no_sync()`` but for its end."""

    def build() -> nn.Module:
        return TinyLM(TinyConfig(vocabulary=160))

    def loss_of(model: Any, number: int) -> torch.Tensor:
        return model(token_batch(number, context.rank)).float().logsumexp(-1).mean()

    def loop(model: Any) -> None:
        with model.no_sync():
            for number in range(3):
                loss_of(model, number).backward()
        loss_of(model, 3).backward()

    stages = plan(build, 2, transport="nccl", weight_slots=3, accumulate=4).stages
    for stage, slots in zip(stages, SLOTS, strict=True):
        with case(slots), simulated_device():
            model: Any = StreamShard(build(), **slots)
            sent = sent_in_last(model, functools.partial(model.accumulate, range(4), loss_of))
            _assert_equal(stage, model)
            assert sent == stage.sent_bytes
            if slots in (SLOTS[0], SLOTS[3]):
                sent = sent_in_last(model, functools.partial(loop, model))
                assert sent == stage.loop.sent_bytes(4)


def _config(directory: Path, **sizes: Any) -> Path:
    transformers = pytest.importorskip("transformers")
    ours = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    ours |= {"num_key_value_heads": 8, "vocab_size": 128256, "architectures": ["LlamaForCausalLM"]}
    transformers.LlamaConfig(**{**ours, **sizes}).save_pretrained(directory)
    return directory / "config.json"


def test_llama_3_8b_on_8_ranks_takes_what_the_guide_says(tmp_path: Path) -> None:
    """commands.md: the whole table; dial.md: its parts; README.md: the peak with gradients that have no slot yet."""
    build = builder_of(str(_config(tmp_path)))
    planned = plan(build, 8)
    assert str(planned) in (ROOT / "docs/guide/commands.md").read_text()
    zero_3 = planned.stages[0]
    layer, head = 218_112_000, 525_336_576
    start, total = zero_3.start_bytes, zero_3.total_bytes
    # The first layer's bf16 gradients wait when it and the embedding have no main grads.
    last, first_layer = start + 2 * head, total + 2 * layer - 4 * (layer + head) / 8
    sizes = 16 / 8 * planned.numel, 2 * (layer + head), start, total, last, first_layer
    state, slots, begin, end, first, peak = (f"{size / 2**30:.1f}" for size in sizes)
    dial, readme = (" ".join((ROOT / name).read_text().split()) for name in ("docs/guide/dial.md", "README.md"))
    assert f"takes {state} GiB for 16/N bytes of each parameter, and {slots} for two slots, " in dial
    assert f"and of the head: {end} in all, and {begin} at the start of backward." in dial
    assert f"StreamShard takes {peak} GiB on 8 ranks, " in readme
    assert f"main grads have no memory yet: {first} GiB" in readme
    assert f"State and buffers are {end} GiB" in readme
    # 32 layers in forward, 31 in backward, embedding, head and root unit once; 7/8 of 2 bytes, and 4 for gradients.
    kept = 218_112_000 + 2 * 525_336_576 + 4096
    for stage, least in (
        (zero_3, 2 * (2 * planned.numel - kept) + 4 * planned.numel),
        (planned.stages[-1], 6 * planned.numel),
    ):
        assert 7 * least // 8 <= stage.sent_bytes <= 1.0001 * 7 * least // 8  # but for padding
    in_order = plan(build, 8, precision=Precision(sums_in_rank_order=True)).stages[0]
    assert in_order.total_bytes == zero_3.total_bytes  # and half of the gradients' bytes are sent
    assert zero_3.sent_bytes - in_order.sent_bytes == pytest.approx(7 / 8 * 2 * planned.numel, rel=1e-3)


def test_llama_3_8b_with_offload_on_one_rank_is_what_the_guide_says(tmp_path: Path, command: Any) -> None:
    """docs/guide/commands.md: memory in both places, and the time of a step. JSON has the same numbers."""
    words = ["plan", _config(tmp_path).parent, "--ranks", 1, "--offload", "state", "--machine", "pcie5"]
    words += ["--batch", 4, "--seq", 8192, "--micro-batches", 2, "--checkpointing"]
    with no_activations:
        text = command(*words)
        told = json.loads(command(*words, "--link", "10GB/s", "--json"))
    guide = (ROOT / "docs/guide/commands.md").read_text()
    assert text[text.index("GiB per rank") : text.index("\n\nsent by")] in guide
    assert text[text.index("ZeRO-3, a step") :] in guide
    assert told["stages"][0]["host_total_bytes"] == 18 * told["numel"]
    assert told["step"]["machine"] == {"link": 10e9, "host_memory": 150e9, "flops": 400e12, "ranks": 1}
    assert told["step"]["passes"][0]["in_bytes"] == 16 * told["numel"]


def test_a_device_budget_takes_state_out_of_host_memory(tmp_path: Path) -> None:
    build = builder_of(str(_config(tmp_path)))
    whole, part = (plan(build, 1, offload="state", device_budget=size).stages[0] for size in (0, "20GiB"))
    assert 16 * 2**30 < whole.host_total_bytes - part.host_total_bytes <= 20 * 2**30
    assert part.memory.adam_bytes + part.memory.host_adam_bytes == whole.memory.host_adam_bytes


def test_a_budget_that_is_too_small_says_how_to_find_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 1. The fewest ranks that fit are found up to the most that can sum in 16 bits."""
    build = functools.partial(TinyLM, TinyConfig(vocabulary=4096, dim=256, depth=6))
    given: dict[str, Any] = {"precision": Precision(reduce_dtype=torch.bfloat16)}
    needed = plan(build, 200, **given).stages[0].total_bytes
    given["budget"] = (needed + 3 * 2**29) * 20 // 19 + 40
    assert 192 < plan(build, **given).world_size <= 200
    assert "nothing fits. More ranks make room" in str(plan(build, 6, **given))
    assert "stay free for fragmentation\n" in str(plan(TinyLM, 2, transport="sockets", budget="1GiB"))
    assert main(["plan", "tests.models:TinyLM", "--ranks", "6", "--budget", "1GiB"]) == 1
    said = capsys.readouterr()
    assert "nothing fits. More ranks make room" in said.out
    assert said.err == "streamshard plan: nothing fits the budget\n"


def test_what_fits_llama_3_8b_is_what_the_guide_says(tmp_path: Path, command: Any) -> None:
    """docs/guide/commands.md: with its activations, for 8 ranks and for the fewest."""
    guide = (ROOT / "docs/guide/commands.md").read_text()
    words = ["plan", _config(tmp_path), "--batch", "1", "--seq", "8192", "--budget"]
    found = list[Activations]()

    def estimate(*args: Any, **kwargs: Any) -> Activations:
        """Once, which takes seconds."""
        found[:] = found or [estimate_activations(*args, **kwargs)]
        return found[0]

    for options, begin in (("80GiB --ranks 8", "activations, GiB"), ("80G", "fits with")):
        with mock.patch("streamshard.tools.planner.estimate_activations", estimate):
            said = command(*words, *options.split())
        assert said[said.index(begin) :] in guide and said[: said.index("\n")] in guide


def test_the_command_plans_the_model_of_a_function(tmp_path: Path, command: Any, monkeypatch: Any) -> None:
    """In a file of the current directory too. Activations are of its only argument."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_model_28.py").write_text("from tests.models import TinyLM\ndef build(): return TinyLM()\n")
    words = "plan my_model_28:build --ranks 2 --precision fp32 --batch 3 --seq 8 --json"
    told = json.loads(command(*words.split()))
    assert told["model"] == "TinyLM"
    wanted = plan(on_meta(TinyLM), 2, precision="fp32")
    assert told["stages"] == json.loads(json.dumps([dataclasses.asdict(stage) for stage in wanted.stages]))
    assert len(told["activation_bytes"]) == 2
    sys.path.remove(str(tmp_path))


def test_the_command_takes_the_arguments_of_plan(command: Any) -> None:
    units = {"units": ["Block", "embedding"], "resident": ["blocks.1"], "min_unit_size": "16KiB"}
    in_order = {"replicas": 3, "precision": Precision(param_dtype=torch.float32, sums_in_rank_order=True)}
    for options, arguments in (
        ("--units Block embedding --resident blocks.1 --min-unit-size 16KiB", units),
        ("--replicas 3 --precision fp32 --sums-in-rank-order", in_order),
        ("--replicas 3 --shard-over-replicas", {"replicas": 3, "shard_over_replicas": True}),
    ):
        words = ["plan", "tests.models:TinyLM", "--ranks", "2", *options.split()]
        wanted = plan(TinyLM, 2, **arguments)  # type: ignore[arg-type]
        assert json.loads(command(*words, "--json")) == json.loads(json.dumps(dataclasses.asdict(wanted)))
        assert (text := command(*words)) == f"{wanted}\n"
    assert "parameters on 2 ranks in each of 3 replicas" in text


def test_arguments_that_a_plan_cannot_have_are_named() -> None:
    for given, told in (
        ({"mesh": None}, "mesh: a plan is of the ranks that share one replica.*world_size"),
        ({"replicas": 0}, "replicas=0: wanted a positive number"),
        ({"shard_over_replicas": True}, "shard_over_replicas=True without replicas: .*replicas=2"),
        ({"replicas": 2, "offload": "state"}, "a 2-D mesh: averages over replicas would need main grads on the device"),
        ({"weight_slot": 3}, "weight_slot is no argument of StreamShard: .* Did you mean 'weight_slots'"),
        ({"accumulate": 1}, "accumulate=1: wanted the number of micro-batches of a step, at least 2"),
        (
            {"accumulate": 4, "step": Step(MACHINES["pcie5"], micro_batches=2), "seq": 8},
            "micro_batches=2, accumulate=4: wanted one of the two",
        ),
        (
            {"step": Step(MACHINES["pcie5"]), "batch": 2, "seq": 8},
            'copies nothing from host memory: give offload="state',
        ),
        ({"accumulate": 4, "tp": 2}, "model.accumulate: the model has DTensors .*loop with loss.backward"),
    ):
        with pytest.raises(ConfigError, match=told):
            plan(TinyLM, 8, **given)  # type: ignore[arg-type]
    for name in ("micro_batches", "active"):
        with pytest.raises(ConfigError, match=f"{name}=0: wanted a positive number"):
            Step(MACHINES["pcie5"], **{name: 0})  # type: ignore[arg-type]


def test_without_ranks_the_command_plans_the_fewest_that_fit(tmp_path: Path, command: Any) -> None:
    """With all options. One rank, if it suffices or none does; multiples of those that DTensors are cut over."""
    config = str(_config(tmp_path, num_hidden_layers=4))
    for options, count, given in (
        ("--budget 12GiB --slots 3", 4, {"weight_slots": 3}),
        ("--budget 12.5GiB --accumulate 2 --seq 64 --machine pcie5", 7, {"accumulate": 2, "seq": 64}),
        ("--budget 12GiB --tp 2", 4, {"tp": 2}),
        ("--budget 40GiB", 1, {}),
        ("--budget 2GiB", 1, {}),
    ):
        step = Step(MACHINES["pcie5"]) if "seq" in given else None
        budget = options.split()[1]
        wanted = plan(builder_of(config), count, budget=budget, step=step, **given)
        assert command("plan", config, *options.split(), code=int(budget == "2GiB")) == f"{wanted}\n", options
        if (fewer := count - given.get("tp", 1)) > 0:
            fit = plan(builder_of(config), fewer, budget=budget, **given).fit
            assert fit is not None and fit.choice is None
    assert "give --ranks, or --budget" in command("plan", config, code=2)
    with pytest.raises(ConfigError, match="world_size=None: wanted the number of ranks, or a budget"):
        plan(TinyLM)


def test_accumulation_pays_where_a_loop_waits_for_the_link(tmp_path: Path, command: Any) -> None:
    """docs/guide/accumulation.md: between ranks, and from host memory."""
    guide = (ROOT / "docs/guide/accumulation.md").read_text()
    words = ["plan", _config(tmp_path), *["--accumulate", "8", "--checkpointing", "--batch", "1"]]
    ranks = ["--ranks", "8", "--seq", "4096", "--machine", "pcie5", "--flops", "165T", "--link"]
    with no_activations:
        between_ranks, fast = (command(*words, *ranks, link) for link in ("25GB/s", "400GB/s"))
        from_host = command(*words, *["--ranks", "1", "--seq", "8192", "--offload", "state", "--machine", "pcie5"])
    assert between_ranks[between_ranks.index("sent by") : between_ranks.index("\n\narguments")] in guide
    assert between_ranks[between_ranks.index("ZeRO-3, a step") :] in guide
    assert from_host[from_host.index("ZeRO-3, a step of 8 x 8,192 tokens by") :] in guide
    assert fast.splitlines()[-1] == "model.accumulate does not pay: a step takes 12.78 s, in a loop 12.78 s"


def test_a_model_of_the_hub_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is downloaded: the message says which file to fetch."""
    monkeypatch.setattr(pytest.importorskip("huggingface_hub.constants"), "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"wanted a config.json.*hf download.*maker/tiny is read by"):
        builder_of("maker/tiny")
    cache = tmp_path / "models--maker--tiny"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("abc")
    _config(cache / "snapshots" / "abc", hidden_size=64, num_hidden_layers=1)
    with torch.device("meta"):
        assert type(builder_of("maker/tiny")()).__name__ == "LlamaForCausalLM"


def test_bad_input_is_named(tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(tmp_path)
    unknown, new, empty = tmp_path / "unknown.json", tmp_path / "new.json", tmp_path / "empty"
    unknown.write_text('{"model_type": "llama", "architectures": ["NoSuchModel"]}')
    new.write_text('{"model_type": "no-such-type"}')
    empty.mkdir()
    for model, options, told in (
        ("nowhere/config.json", "", "wanted a config.json, its directory, a hub name in the cache (hf d"),
        (empty, "", "empty is read by transformers"),
        (unknown, "", "NoSuchModel"),
        (new, "", "no-such-type"),
        ("no.such.module:build", "", "No module named 'no'"),
        ("tests.models:build", "", "has no attribute 'build'"),
        (config, "--ranks 0", "world_size=0: wanted a positive number"),
        (config, "--slots 1", "weight_slots=1: wanted"),
        (config, "--batch 1 --seq 0", "batch=1, seq=0: wanted positive numbers"),
        (config, "--machine pcie5 --offload state", "step is predicted with batch and seq"),
        (config, "--checkpointing", "--checkpointing and --active change what --machine predicts"),
        (config, "--link 50GB/s", "give --machine too"),
        (config, "--link 50 --machine pcie5", "link='50': wanted a number and GB/s"),
        (config, "--local-ranks 0 --machine pcie5", "ranks=0: wanted a positive number"),
        (config, "--device-budget 1GB", "device_budget='1GB': without offload"),
        (config, "--units NoSuchLayer", "units names 'NoSuchLayer'"),
        (config, "--min-unit-size some", "min_unit_size='some': wanted"),
        # Before the model is built, which takes seconds.
        *(("no.such.module:build", f"{option} 80X", "80X'") for option in ("--budget", "--device-budget")),
    ):
        assert told in command("plan", model, "--ranks", 8, *options.split(), code=2)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install transformers" in command("plan", config, "--ranks", 8, code=2)
