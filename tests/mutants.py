"""Small changes that make the engine wrong, one at a time, each of which some test has to notice. Run by hand:

    python -m tests.mutants                    # all of them, one line each
    python -m tests.mutants engine settle      # those whose function or change has one of these words

They are about streams, the bookkeeping of gradients, and publishing; `tests/test_waits.py` leaves out each line that
waits and says so (``# rule 5``). Each is applied to a copy of the repository in a temporary directory, never to the
tree. A mutant names a function and a fragment of it, so it survives whatever else changes in that function, and a
rename that is made everywhere.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 150.0  # of all tests of one mutant; one that hangs is caught
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",  # which would be taken for that of the next change, of the same size and second
    "TEST_GROUP_TIMEOUT_S": "15",
    "TEST_RUN_TIMEOUT_S": "25",
}


class Drop(NamedTuple):
    """Leave out the one statement that begins with `start`, with its body."""

    start: str

    def apply(self, source: str, function: ast.FunctionDef) -> str:
        statements = (node for node in ast.walk(function) if isinstance(node, ast.stmt) and node is not function)
        found = [node for node in statements if _text(source, node).startswith(self.start)]
        if len(found) != 1:
            raise LookupError(f"{len(found)} statements of {function.name} begin with {self.start!r}")
        (node,) = found
        lines = source.splitlines(keepends=True)
        return "".join([*lines[: node.lineno - 1], " " * node.col_offset + "pass\n", *lines[node.end_lineno :]])


class Swap(NamedTuple):
    """Replace the one fragment `old` of a function by `new`."""

    old: str
    new: str

    def apply(self, source: str, function: ast.FunctionDef) -> str:
        text = _text(source, function)
        if text.count(self.old) != 1:
            raise LookupError(f"{function.name} has {self.old!r} {text.count(self.old)} times")
        return source.replace(text, text.replace(self.old, self.new), 1)


class Mutant(NamedTuple):
    """A change of a function (``name`` or ``Class.name``) of a file in ``streamshard`` that makes the engine wrong.

    `tests` has the files of tests that are likely to notice it, without prefix and suffix, in the order of trying.
    Behind a colon stands a word in the test's name. Tests for GPUs run on one that is played.
    """

    file: str
    function: str
    change: Drop | Swap
    tests: str

    def __str__(self) -> str:
        return f"{self.file}.{self.function}: {self.change}"

    def apply(self, source: str) -> str:
        """The text of the file with this change; a `LookupError` if there is no such function or place in it."""
        node: ast.AST = _parsed(source)
        for name in self.function.split("."):
            found = [each for each in ast.iter_child_nodes(node) if getattr(each, "name", None) == name]
            if len(found) != 1:
                raise LookupError(f"{self.file} has {len(found)} {self.function}")
            (node,) = found
        assert isinstance(node, ast.FunctionDef)
        return self.change.apply(source, node)

    @property
    def test_files(self) -> list[str]:
        names = self.tests.partition(":")[0].split()
        return [str(_test_file(name).relative_to(ROOT)) for name in names]


_parsed = functools.cache(ast.parse)


@functools.cache
def _test_file(name: str) -> Path:
    (path,) = (ROOT / "tests").rglob(f"test_{name}.py")
    return path


@functools.cache
def _lines(source: str) -> list[bytes]:
    return source.encode().splitlines(keepends=True)


def _text(source: str, node: ast.stmt) -> str:
    """As `ast.get_source_segment`, which splits the source into lines each time."""
    lines = _lines(source)[node.lineno - 1 : node.end_lineno]
    text = b"".join(lines)
    return text[node.col_offset : len(text) - len(lines[-1]) + (node.end_col_offset or 0)].decode()


_PUT_THEN_LOOK = "inside.put(MANIFEST_NAME, manifest)\n            if not inside._is_begun():"
_LOOK_THEN_PUT = (
    "begun = inside._is_begun()\n            inside.put(MANIFEST_NAME, manifest)\n            if not begun:"
)
_OPTIONS = "offload_events:loop"
_VISITS = "in enumerate(self._visits)}"
_LAYER_MAJOR = "accumulate:gradients_are"
_STREAMS = "simulated_device:precision or averages or stream"
_MAY_CHANGE = "simulated_device:weights_may"
_UNORDERED = Swap(
    "self.streams.on(self.stream), torch.no_grad():\n            work", "torch.no_grad():\n            work"
)
_NO_STREAM = Swap("self.streams.on(self.stream)", "torch.no_grad()")
# One line that stands before a statement of a test's simulated device.
_ON_COMPUTE = "with self.streams.module.stream(self.streams.module.compute):"
_ON_COMM = "with self._streams.on(self.weight_slot.arrived.source):"
_ASIDE = "with module.stream(module.Stream()):"

_BY_FILE: dict[str, list[tuple[str, Drop | Swap, str]]] = {
    "checkpoint/block_state": [
        ("extent_of", Swap("for each in (start, stop, last)", "for each in (0, stop - start, last)"), "block_state"),
        ("extent_of", Drop("if any(piece.range_of"), "block_state"),
    ],
    "checkpoint/directory": [
        ("publish_checkpoint", Swap("and each.path != directory", ""), "directory"),
        ("publish_checkpoint", Swap("time.time_ns()", "0"), "directory:meanwhile"),
        ("publish_checkpoint", Swap("*(each + 1 for each in known)", "0"), "directory:clocks"),
        ("_delete_old", Swap("len(own) - keep", "len(own) + 1 - keep"), "directory"),
        ("read_entry", Drop("check_sizes(path, manifest)"), "directory"),
        ("Entry.order", Swap("made.generation, made.number", "made.number, made.generation"), "directory"),
        ("read_entry", Drop("if is_shortage(error)"), "directory"),
        ("open_intact", Drop("if any(ranks.gather_objects("), "directory"),
        ("open_verified", Drop('run_on_all_ranks(ranks, "verify"'), "directory"),
    ],
    "checkpoint/save": [
        ("_save_in_background", Swap("own_ranks.users_group if", "None if"), "object_storage:exits"),
        ("start_copies", Drop("copied.synchronize()"), "simulated_device:copies"),
        ("start_copies", Swap("current_stream(device))", "Stream())"), "simulated_device:copies"),
        ("start_copies", Drop("sources.append(piece.data)"), "simulated_device:copies"),
        ("start_copies", Swap("copy = copy.", f"{_ASIDE} copy = copy."), "simulated_device:copies"),
        ("start_copies", Swap('pin_memory=device.type != "cpu"', "pin_memory=False"), "gpu:pinned"),
    ],
    "checkpoint/export": [
        ("export_safetensors", Drop("finish_running()"), "restore:export_waits"),
        ("upload", Swap("name_files(files, names, partial)", "files"), "object_storage:two_exports"),
        ("refuse_replacing", Drop("if isinstance(root, Url)"), "object_storage:export"),
        ("name_files", Swap("partial.name.split('.')[1]", "8 * chr(48)"), "kills:no_name"),
    ],
    "checkpoint/local_directory": [
        ("LocalDirectory.sweep", Drop("fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)"), "directory")
    ],
    "checkpoint/object_store": [
        ("ObjectStore.begin", Swap("put(BEGUN", "put(MANIFEST_NAME"), "kills:loses"),
        ("ObjectStore.publish", Swap(_PUT_THEN_LOOK, _LOOK_THEN_PUT), "object_storage:deletes"),
        ("ObjectStore.publish", Drop("with contextlib.suppress(OSError)"), "object_storage:deletes"),
        ("ObjectStore.sweep", Drop("if not self._inside(name).is_file(SWEPT)"), "object_storage:deletes"),
        ("ObjectStore.sweep", Drop("if not self._inside(name).is_file(MANIFEST_NAME)"), "kills:loses"),
        ("ObjectStore.sweep", Swap("not self._inside(name).is_file(MANIFEST_NAME)", "True"), "object_storage:deletes"),
        ("ObjectStore.delete", Drop("self._inside(name).unlink(MANIFEST_NAME)"), "kills:loses"),
        ("ObjectStore.complete", Swap(" if self._inside(name).is_file(MANIFEST_NAME)", ""), "object_storage"),
        (
            "ObjectStore.remove",
            Swap("not self._inside(partial.path.name).is_file(MANIFEST_NAME)", "True"),
            "object_storage",
        ),
        ("ObjectStore.writing", Drop("_abandon(file)"), "object_storage:upload"),
    ],
    "checkpoint/stop_on_signal": [
        ("StopOnSignal.exit", Drop("run_on_all_ranks"), "stop_on_signal:failed_save"),
        ("StopOnSignal.requested", Swap("max(noted)", "min(noted)"), "stop_on_signal:stops_all"),
        ("_after_fork_in_child", Drop("os.setpgid(0, 0)"), "stop_on_signal:group_of"),
    ],
    "comm/communicator": [
        ("Communicator._beside_compute", Drop("arrived.wait()"), _STREAMS),
        ("Communicator._beside_compute", Drop("written.wait()"), _STREAMS),
        ("Communicator._blocking", Swap("not self.streams.has_streams", "True"), _STREAMS),
    ],
    "comm/groups": [
        ("_end", Drop("group.abort()"), "groups"),
        ("_meet_at_launchers_store", Swap("PrefixStore(start, store)", "store"), "stop_on_signal:again"),
        ("_agree_on_name", Swap("while not", "if not"), "groups:late"),
    ],
    "comm/host_groups": [
        ("close_connections", Swap("groups if users_too else ()", "groups"), "flight_recorder:alone"),
        ("host_group_of", Drop("_wait_for_all("), "groups:later"),
    ],
    "comm/ranks": [
        ("RankGroup.fail", Drop("self.recorder.post_failure(failure)"), "flight_recorder:another_model"),
        ("RankGroup._meet", Drop("self.fail("), "groups:two_halves"),
        ("RankGroup._meet", Swap("self.waiting(what)", "self.talk(what, RecordKind.MEETING)"), "groups:one_entry"),
    ],
    "comm/tree": [("gather_to_first", Swap("known.setdefault(each, each)", "each"), "tree:equal")],
    "comm/watchdog": [
        ("_after_fork_in_child", Drop("flight_recorder.watched, _watchdog = "), "flight_recorder:forked"),
        ("_after_fork_in_child", Swap("_Watchdog(inherited)", "_Watchdog()"), "shared_memory:forked"),
        ("_after_fork_in_child", Swap("[_watchdog.inherited, ", "["), "shared_memory:forked"),
    ],
    "comm/flight_recorder": [
        ("FlightRecorder.__init__", Swap(" and not is_beside_training", ""), "flight_recorder:apart"),
        ("FlightRecorder._find_difference", Swap(" or self._is_beside_training", ""), "flight_recorder:apart"),
        ("FlightRecorder._find_difference", Swap(" and _COLLECTIVE.match(shown.place)", ""), "flight_recorder:library"),
        ("FlightRecorder._show_if_idle", Drop("elif self._shown is not None"), "flight_recorder:takes_it_back"),
        ("FlightRecorder._look_for_failure", Drop('log.error("%s", self.difference)'), "flight_recorder:alone"),
        ("FlightRecorder.explain", Drop("if self.difference is not None:"), "flight_recorder:explains"),
    ],
    "comm/gloo": [
        (
            "PairwiseTransport.start_reduce",
            Swap("*received[:rank], chunks[rank], *received[rank:]", "chunks[rank], *received"),
            "same_bits:fp32",
        ),
    ],
    "comm/transport": [
        ("Transport._start", _UNORDERED, "whole_parameters:wait"),
        ("Exchange._abandon", Drop("state_of(self.group).abandoned.extend(self.messages)"), "transport"),
        ("sum_in_rank_order", Swap("in others:", "in others[::-1]:"), "same_bits:fp32"),
    ],
    "comm/nccl": [
        ("NcclTransport._exchange", Swap("  sum_in_rank", f"  {_ON_COMPUTE} sum_in_rank"), _STREAMS),
        ("NcclTransport._exchange", Swap(".unbind()", ".unbind()[::-1]"), "same_bits:device"),
        ("NcclTransport.meet", _NO_STREAM, _STREAMS),
        ("NcclTransport.start_flags", Swap("ReduceOp.MAX", "ReduceOp.SUM"), "transport"),
        ("NcclTransport.start_gather", _NO_STREAM, _STREAMS),
        ("NcclTransport.start_reduce", _NO_STREAM, _STREAMS),
        ("NcclTransport.start_reduce", Swap("  out.mul_(", f"  {_ON_COMPUTE} out.mul_("), _STREAMS),
        ("NcclTransport.start_reduce", Drop("if before > 1:"), "transport"),
        ("NcclTransport.start_reduce", Swap("self.rank * out.numel(), out", "0, out"), _STREAMS),
        ("NcclTransport.start_reduce", Swap(" and not accumulate:", ":"), "transport"),
    ],
    "comm/shared_memory": [
        ("SharedBuffers.free", Drop("if first < last:"), "shared_memory:pages"),
        ("SharedMemoryTransport.copy_until", Drop("if for_all:"), "shared_memory"),
        ("SharedMemoryTransport.copy_until", Drop("self._await(Counter.PUBLISHED"), "shared_memory invariants matrix"),
        ("SharedMemoryTransport.sum_until", Drop("for each in self._buffers"), "shared_memory:mixed"),
        ("SharedMemoryTransport.sum_until", Swap("_order(chunks,", "_order(chunks[::-1],"), "same_bits:fp32"),
        ("SharedMemoryTransport.progress", Swap(" or each.written[place] != written[place]", ""), "shared_memory:mix"),
        ("SharedMemoryTransport._await", Drop("self.copy_until("), "accumulate:no_layer_on_a_rank"),
        ("SharedMemoryTransport._await", Drop("elif self._started and"), "shared_memory:for_an_all_gather"),
        ("SharedMemoryTransport._everywhere", Swap("self._among", "range(self.world_size)"), "transport:same_experts"),
        ("SharedMemoryTransport.among", Swap(", other._group_of =", ", _ ="), "transport:same_experts"),
    ],
    "comm/streams": [
        ("Fence.record", Swap("self.source)", "StreamName.COMPUTE)"), _STREAMS),
        ("Fence.wait", Swap("device_stream(target)", "device_stream(StreamName.COMPUTE)"), _STREAMS),
        ("RankWait.__exit__", Drop("self._log.waits.pop()"), "groups:leaves_no_wait"),
        ("Streams.__init__", Swap("Stream(device, ", "Stream("), _STREAMS),
        ("Streams.__init__", Swap(", priority=-1", ""), _STREAMS),
        ("Streams.__init__", Swap("StreamName.REPLICA, ", ""), _STREAMS),
        ("Streams.device_stream", Swap("_raw(self.device.index)", "_raw(0)"), _STREAMS),
        (
            "Streams.device_stream",
            Swap("= self.module.current_stream(self.device)", "= self.module.current_stream()"),
            _MAY_CHANGE,
        ),
        ("Streams.device_stream", Swap("current != address", "address is None"), _STREAMS),
        ("Streams.device_stream", Swap("self._own[name]", "self._own.get(name)"), "simulated_device:not_there"),
        ("Streams.keep", Drop("buffer.record_stream(stream)"), _STREAMS),
        ("_OnStream.__init__", Swap("device_stream(name)", "device_stream(StreamName.COMPUTE)"), _STREAMS),
    ],
    "core/backward": [
        ("Backward.enter", Drop("if graph.plan is not plan:"), "ends:second_backward"),
        ("Backward._advance", Drop("if any(other.is_bound"), "ends:read_before"),
        (
            "Backward._advance",
            Swap(" or not self._waiting.isdisjoint(schedule.visits[schedule.position : visit])", ""),
            "matrix",
        ),
        ("Backward._close_pass", Drop("for unit in engine.units[1:]:  "), "programs"),
        ("Backward._recompute", Swap("unit.index in self.graph.silent", "True"), "programs:once"),
        ("Backward._recompute", Swap("self.graph.called.isdisjoint(", "bool("), "programs:once"),
        ("Backward.recover", Drop("while self.callback_of() is not None:"), "loops"),
        ("Backward.break_off", Drop("self._engine.reductions.is_open = False"), "loops"),
        ("Backward.begin", Drop("unit.copy_trainability()"), "programs"),
        ("Backward.begin", Drop("engine.weights_written.wait()"), "simulated_device:once_each"),
        ("Backward._unshard", Drop("unit.wait_until_ready()"), "matrix"),
        ("Backward.begin", Drop("engine.progress.is_unreached = False"), "loops"),
        ("Backward.enter", Drop("refuse_changed(engine.units[index], versions)"), "graphs"),
        ("Backward._unshard", Drop("if unit.guard.is_gone:"), "programs"),
        ("Backward.recover", Drop("self._close_pass()"), "loops invariants"),
        ("Backward.finish", Drop("engine.finish_reading()"), "shared_memory"),
    ],
    "core/graph_hooks": [
        ("_lookups_in", Swap(" and not node._saved_scale_grad_by_freq", ""), "lookups:models"),
        ("_keep_lookup", Swap(" or not engine.reductions.is_open", ""), "lookups:models"),
        ("_keep_lookup", Swap("not param.unsharded.requires_grad", "False"), "lookups:models"),
        ("_keep_lookup", Swap("grad.numel() >= param.layout.numel or ", ""), "lookups:smaller"),
        ("watch_nodes", Swap("node._sequence_nr()) >= first", "node._sequence_nr()) >= 0"), "programs"),
        ("_on_gradient", Swap(" or torch.is_grad_enabled()", ""), "graphs"),
        ("need_weights", Swap(" or unit.grads.slot.weights is not None", ""), "graphs"),
    ],
    "core/engine": [
        ("Changes.find", Swap("self._unseen.union", "set().union"), "replicas:only_ranks_with"),
        ("Changes.find", Swap("now[kind] != before.get(kind)", "not before"), "replicas:only_ranks_with"),
        ("Engine.expire_slots", Drop("slot.move(WeightState.EMPTY, None)"), "programs"),
        ("Engine.expire_weights", Drop("self._changes.forget()"), "replicas:only_ranks_with"),
        ("Engine.set_synced", Drop("if is_synced:"), "invariants loops programs graphs dial"),
        ("Engine.finish_reading", Swap("unit.is_sent_as_is or ", ""), "shared_memory"),
        ("Engine.finish_reading", Swap(" or unit.weight_slot.state is WeightState.ARRIVING", ""), _MAY_CHANGE),
    ],
    "core/forward": [
        ("Forward.read", Swap(" or not self._schedule.is_last(unit.index)", ""), "ends:otherwise_later"),
        ("Forward.read", Drop("self.graph.versions.setdefault"), "ends"),
        ("begin_forward", Drop("engine.phase.recover()"), "loops"),
        ("Forward.finish", Drop("unit.guard.end_pass()"), "absent_weights"),
        ("Forward.finish", Drop("engine.finish_reading()"), _MAY_CHANGE),
        ("Forward.finish", Swap("engine.ranks.failure is not None or", "True or"), "invariants"),
        ("Forward.finish", Swap("engine.issue(self._schedule.advance_to())", "self._schedule.advance_to()"), "matrix"),
    ],
    "core/params": [
        ("FlatParam.allocate_grads", Swap("keeps_slot and dtype", "dtype"), "matrix dial"),
        ("Param.forget_grad", Drop("self.clear_main_grad()"), "invariants dial programs graphs"),
        ("Param.adopt_grad", Drop("self.main_grad.copy_(grad)"), "pieces loops"),
        ("Param.forget_grad", Drop("if in_slot:"), "invariants dial programs graphs"),
        ("FlatParam.add", Swap(" if form.box else ranks.counts_copies", " or True"), "tensor_parallel:norms"),
        ("FlatParam.make_unsharded", Swap("(alias, whole.detach())", "(alias,)"), "tensor_parallel:changed"),
    ],
    "norms": [
        ("local_norms", Swap("dtype=torch.float64, device", "device"), "same_bits:clipped"),
        ("_groups", Swap("numel + tensor.numel() > _GROUP", "len(group) == 1"), "norms"),
        ("local_norms", Swap("split(sizes)", "split(sizes)[::-1]"), "norms"),
        ("_norm_of_one", Swap("torch.stack(squares).sum() if squares[1:] else squares[0]", "squares[0]"), "norms"),
    ],
    "guards/loop": [("check_step", Swap("graph_task_id() != -1", "False"), "step_in_backward:penalty")],
    "core/outer_shards": [
        ("OuterShards.begin_pass", Swap("flat.kind.trains in changed", "True"), "replicas:cross"),
        ("OuterShards._take_turn", Drop("self._staging.reverse()"), "replicas:take_turns"),
        ("OuterShards.begin_reduction", Swap("self._adds = adds", "self._adds = False"), "replicas:every_way"),
        ("OuterShards.begin_reduction", Swap("unit.index, adds)", "unit.index, False)"), "replicas:fails"),
        ("OuterShards.forget", Drop("self._main_adds.clear()"), "replicas:fails"),
        ("OuterShards._start", Drop("self._under_way["), "replicas:every_way"),
    ],
    "core/grad_divisor": [
        ("GradDivisor.summing", Drop("self.set(before)"), "transformers:training_equals"),
        ("GradDivisor.set", Swap("* self._ranks.n_parts", ""), "parallelism_config:with_experts"),
    ],
    "core/reductions": [
        ("UsedParams.refuse_out_of_step", Drop("if most + others > 255"), "accumulate:different"),
        ("UsedParams.start", Swap("pin_memory=is_remote", "pin_memory=False"), "gpu:pinned"),
        ("UsedParams.start", Swap("non_blocking=is_remote", "non_blocking=False"), "gpu:pinned"),
        ("Reductions.start", Drop("self.over_replicas.finish_before(unit)"), "replicas"),
        ("Reductions.start", Drop("if unit.grads.early"), "step_in_backward:parts"),
        ("Reductions.start", Swap("not None and self.is_open", "not None"), "step_in_backward:collectives"),
        ("Reductions.complete", Drop("works += self._gives_next[1].works"), "step_in_backward:units"),
        ("Reductions._give_early", Swap("(ranks.in_hook())", "(contextlib.nullcontext())"), "step_in_backward:inside"),
        ("Reductions._give_early", Drop("unit.grads.drop_early()"), "step_in_backward:units"),
        ("Reductions.begin", Swap("elif reduces", "if reduces"), "step_in_backward:replicas"),
        ("Reductions.start", Swap("on_device_stream(self._stream)", "on(StreamName.COMPUTE)"), _STREAMS),
        ("Reductions.note", Drop("self._others.setdefault("), _STREAMS),
        ("UsedParams.finish", Swap("unit.grads.may_have_grad(param)", "param.unsharded.requires_grad"), "programs"),
    ],
    "core/replicas": [
        ("OverReplicas.finish_before", Drop("self.flush()"), "replicas:every_way"),
        ("OverReplicas.add", Drop("self._reduced.record(*reduction)"), "replicas"),
        ("OverReplicas.finish", Swap("arrived in", "_ in"), "replicas"),
        ("OverReplicas.finish", Swap("sorted(self._left)", "()"), "replicas"),
        ("OverReplicas.add", Swap("not self._is_synced", "False"), "replicas"),
    ],
    "core/tied": [
        ("TiedHead.pass_by", Swap("is_present=False", "is_present=True"), "tied"),
        ("TiedHead._is_kept", Swap("uses > _OWN_USES or ", ""), "tied"),
        ("TiedHead._is_kept", Swap(" or storage_uses(self.unit.weight_slot.buffer) > self._least_uses", ""), "tied"),
        ("TiedHead.put_back", Swap("min(self._least_uses, ", "max(self._least_uses, "), "tied"),
        ("TiedHead.put", Drop("with AsTensors():"), "tied"),
    ],
    "core/slots": [
        ("GradSlot.open", Drop("self.weights.shard_read.complete()"), "shared_memory matrix"),
        ("GradSlot.open", Drop("self.weights.move("), "matrix"),
    ],
    "core/unit": [
        ("Unit.start_gather", Drop("slot.shard_read.complete()"), "invariants"),
        ("Unit.start_gather", Drop("slot.arrived.complete()"), "invariants matrix programs"),
        ("Unit.wait_until_ready", Swap("flat.weights.copy_", f"{_ON_COMM} flat.weights.copy_"), _STREAMS),
        ("Unit.start_gather", Drop("self.grads.slot.drained.complete()"), "shared_memory matrix"),
        ("Unit.start_reduce", Drop("self.guard.mark_gone()"), "absent_weights"),
        ("GradSlot.close", Drop("self.scratch.drained = "), "invariants"),
        ("Unit.start_reduce", Swap("flat.reduce_ranks", "self.gather_ranks"), "experts_and_context"),
        ("Unit.start_reduce", Drop("grads.move(GradState.FILLED)"), "programs"),
    ],
    "core/ends": [
        ("Ends.use", Drop("self.elsewhere.add"), "ends:where_the_order"),
        ("Ends.use", Swap("(self.elsewhere if self._has_block else self._early)", "self._early"), "ends:the_order"),
        ("Ends.end_pass", Drop("self._waiting.append"), "ends:no_graph_waits"),
        ("Ends.decide", Drop("elsewhere |="), "ends:where_the_order"),
        ("Ends._join", Swap(".difference(saved)", ""), "ends"),
        ("Ends._join", Swap(".intersection(self._tables)", ""), "ends:first_layer"),
    ],
    "core/allocation": [
        ("join_slots", Drop("ledger.free"), "ends:are_freed"),
        ("join_slots", Drop("kept.is_shared"), "ends"),
    ],
    "core/unit_grads": [
        ("UnitGrads.write_tied", Drop("self.slot.weights.shard_read.complete()"), "shared_memory tied matrix"),
        ("UnitGrads.leave", Swap("param.is_left or ", ""), "replicas:only_another"),
        ("UnitGrads.write_tied", Swap("param.in_slot.add_(grad) if param.is_tied_written else ", ""), "tied"),
        ("UnitGrads.write_tied", Drop("if self.slot.weights is not None"), "tied"),
        ("UnitGrads._write_parts", Swap("param.in_slot if param.is_tied_written else grad", "grad"), "tied"),
        ("UnitGrads._write_parts", Drop("param.is_tied_written = False"), "tied"),
        ("UnitGrads._take_back", Drop("if not param.is_kept:"), "invariants loops programs graphs"),
        ("UnitGrads._leave_slot", Swap("self._ranks.grad_divisor == 1.0 and", ""), "divide_factor:one_rank"),
        ("UnitGrads._leave_slot", Swap("all(", "any("), "experts_and_context:micro_batch"),
        ("UnitGrads.collect", Drop("self._leave_slot()"), "dial"),
        ("UnitGrads.collect", Swap("is_filled or not is_empty", "not is_empty"), "loops programs graphs"),
        ("UnitGrads.collect", Drop("if absent and not adds:"), "programs matrix"),
        ("UnitGrads._wait_for", Drop("current.wait_stream(stream)"), _STREAMS),
        ("UnitGrads.drop", Swap("not self._renew()", "False"), "pieces"),
        ("UnitGrads._renew", Drop("is_alone = is_alone and {*map(getrefcount"), "dial:main_grads"),
        ("UnitGrads._renew", Swap("{*map(len, map(vars, given))} == {_ATTRIBUTES}", "True"), "pieces:serve_again"),
        ("UnitGrads.give", Swap("is_new or param.is_kept", "is_new"), "loops programs"),
        ("UnitGrads.give", Swap("param.is_used = param.is_kept", "param.is_kept"), "matrix"),
        ("UnitGrads.give", Drop("self.has_unreduced = False"), "invariants"),
        ("UnitGrads.leave", Swap(" or (trains and not in_slot)", ""), "replicas"),
        ("UnitGrads.leave", Drop("self.has_unreduced = self.has_unreduced or"), "programs"),
        ("UnitGrads.resume", Drop("param.forget_grad("), "invariants"),
        ("UnitGrads._give_to", Drop("param.given.add_(own)"), "programs"),
        ("UnitGrads.discard", Drop("with AsTensors():"), "invariants loops"),
        ("write_grads", Swap("if adds else", "if False else"), "programs loops"),
        ("write_lookups", Swap(" | (indices == padding)", ""), "lookups:models"),
        ("write_lookups", Swap("total.add_(made)", "made"), "lookups:models"),
        ("write_lookups", Swap("part.add_(total) if adds else ", ""), "lookups:bits"),
        ("write_lookups", Drop("lookups.clear()"), "lookups:models"),
    ],
    "forms": [
        ("DTensorForm.local_grad", Drop("if grad.placements"), "tensor_parallel:one_process"),
        ("DTensorForm.__init__", Drop("self.box = "), "tensor_parallel:norms"),
        ("DTensorForm.__init__", Swap("[self.cut_along] // blocks", "[self.cut_along]"), "parallelism_config:packed"),
    ],
    "guards/piece": [
        ("Piece.is_whole", Swap("and self.ranks.is_alone", ""), "tensor_parallel:example"),
        ("Piece.cut", Swap("part_of(whole.detach(), self.box)", "whole.detach()"), "tensor_parallel:mesh"),
    ],
    "guards/sharded_tensor": [
        ("_compute", Swap("(_norm, _foreach_norm, ", "("), "same_bits:torch"),
        ("_compute", Swap("_foreach_norm, _check_finite, ", "_foreach_norm, "), "wrappers:overflows"),
        ("_norm", Swap("tensor.piece.counted(norm)", "norm"), "tensor_parallel:norms"),
        ("_reduce", Swap("tensor.piece.counted(", "("), "tensor_parallel:norms"),
    ],
    "guards/weights": [
        ("WeightGuard.set_present", Drop("set_versions("), "graphs"),
        ("WeightGuard.mark_gone", Drop("self.set_classes("), "absent_weights:kept_in_place"),
        ("classes_of", Drop("entries[inner] = property"), "frozen"),
    ],
    "build": [
        ("shard_model", Drop("ranks.broadcast(tensor)"), "frozen"),
        ("_taking_weights", Swap("is_part=bool(form_of(found.param).box)", "is_part=False"), "tensor_parallel:other"),
    ],
    "planning/structure": [("replacing", Drop("if not entry"), "transformers:same_global")],
    "planning/layout": [
        ("_by_kind", Swap("form_of(param).is_packed", "False"), "frozen"),
        ("_by_kind", Swap("found.is_expert", "False"), "experts_and_context"),
    ],
    "core/clipping": [("clip_grads", Swap("or piece.counts", "or True"), "tensor_parallel:one_process")],
    "full": [("summon", Drop("_refuse_different(engine, edited, failure)"), "full")],
    "layer_major/step": [
        ("LayerMajorStep._run_forward", Drop("forward.gather_residents()"), "accumulate:leave_out"),
        ("LayerMajorStep._run_backward", Swap("in reversed(list(enumerate(self._visits)))}", _VISITS), _LAYER_MAJOR),
        ("LayerMajorStep._run_backward", Swap("self._micro_batches:  # that", "visit.micro_batches:  #"), _LAYER_MAJOR),
        ("LayerMajorStep._run_backward", Drop("backward.reduce_streamed()"), _LAYER_MAJOR),
        ("LayerMajorStep._run_backward", Drop("backward.end_turn()"), _LAYER_MAJOR),
        ("LayerMajorStep._run_backward", Drop("engine.recover()"), "accumulate:exception"),
    ],
    "layer_major/micro_batch": [
        ("MicroBatch.begin_segment", Drop("self._leaves.clear()"), _LAYER_MAJOR),
        ("MicroBatch.cut_inputs", Drop("self._segments[-1].append("), _LAYER_MAJOR),
        ("MicroBatch._cut_input", Drop("if value._backward_hooks"), "accumulate:cannot_run"),
        ("MicroBatch._cut_input", Drop("value.__dict__.update("), "accumulate:cannot_run"),
        ("MicroBatch._run_part_backward", Drop("roots.update("), _LAYER_MAJOR),
        ("MicroBatch._keep", Swap("dense[param] + grad if param in dense else grad", "grad"), _LAYER_MAJOR),
        ("MicroBatch._inputs_of", Drop("self._refuse_beneath("), "accumulate:cannot_run"),
    ],
    "layer_major/own_state": [
        ("ThreadState.put", Drop("torch.set_grad_enabled("), _LAYER_MAJOR),
        ("with_other_numbers", Swap("manual_seed(seed)", "manual_seed(0)"), "accumulate:random"),
    ],
    "layer_major/sums": [("Sums.swap", Drop("setattr("), _LAYER_MAJOR)],
    "integrations/transformers": [
        ("StreamShardTrainerMixin._dividing_once", Swap("loss / n_ranks", "loss"), "transformers:training_equals"),
        ("StreamShardTrainerMixin._dividing_once", Drop("if not is_multiplied"), "transformers:divisor_of_ones_own"),
        ("StreamShardTrainerMixin._dividing_once", Swap(", divided)", ", backward)"), "transformers:same_global"),
    ],
    "integrations/run_log": [
        ("RunLog._measure", Swap("max(seconds) / self._steps", "seconds[0] / self._steps"), "run_log:means"),
        ("RunLog.step", Swap("loss.detach()", "loss.detach() * loss.item()"), "run_log:only_at"),
        ("_open", Drop("if rest:"), "run_log:killed"),
    ],
    "integrations/join": [
        ("UnevenInputs.__init__", Drop("if (earlier"), "join:exception"),
        ("UnevenInputs.leave", Drop("if self._engine.ranks.grad_divisor"), "join:exception"),
        ("UnevenInputs._announce", Swap("any(row.casts for row in rows)", "False"), "join:equals"),
        ("UnevenInputs._announce", Swap("are_weights_current = False", "expire_weights()"), "offload:never_waits"),
    ],
    "optim/inner": [("InnerOptimizer.__init__", Swap("[[each] for each in wholes]", "[wholes]"), "nanochat")],
    "optim/rounds": [("Round.lay_out", Swap("grad.isnan().all()", "True"), "whole_parameters:nan")],
    "planning/program": [
        ("Schedule.add_request", Drop("self.current = unit"), "program"),
        ("Schedule.advance_to", Swap(": self.position + 1", ": self.position"), "program"),
    ],
    # offload
    "core/host": [
        ("HostState.copy", Swap("non_blocking=True", "non_blocking=False"), "offload:events_order"),
        ("HostState.fetch", Drop("self._stored[unit.index].wait()"), "offload:single_unit"),
        ("HostState.begin_reduction", Drop("self._stored[unit.index].wait()"), "offload:single_unit"),
        ("HostState.begin_reduction", Drop("self._staging.reverse()"), "offload:never_waits"),
        ("HostState.begin_reduction", Drop("self._step("), "offload_events:loop"),
        ("HostState.chunk", Drop("tensors.clear()"), "offload:never_waits"),
        ("HostState.chunk", Drop("self._chunks.reverse()"), "offload:never_waits"),
        ("HostState.stored", Drop("self._stored[unit].record()"), "offload:single_unit"),
        ("HostState.copy_of", Drop("self._streams.keep(copy)"), "offload:events_order"),
        ("HostState.settle", Swap("in self._copied", "in self._copied[1:]"), "offload:events_order"),
        ("HostState.settle", Drop("self._is_busy = False"), "offload:never_waits"),
        ("HostState.launch", Drop("self._is_busy = True"), "offload:changes_no_bit"),
    ],
    "core/host_grads": [
        ("HostGrads.norms", Swap(" and owner not in self._factors", ""), "offload_events:gradients"),
        ("HostGrads.norms", Swap("owner in self._normed", "False"), "offload:never_waits"),
    ],
    "core/late_step": [
        ("LateStep.__init__", Swap('map_tensors({**group, "params": []}', '_copied({**group, "params": []}'), _OPTIONS),
        ("LateStep.run", Drop("host.stored(unit)"), "offload:single_unit"),
        ("LateStep.run", Swap("StreamName.STORE", "StreamName.FETCH"), "offload:never_waits"),
        ("LateStep.run", Drop("host.launch(StreamName.STORE"), "offload:changes_no_bit"),
        ("_Chunk._states", Swap(", copy=not part.is_last", ""), "offload:changes_no_bit"),
        ("_Chunk.store", Swap("non_blocking=True", "non_blocking=False"), "offload:events_order"),
        ("_Chunk.step", Drop("self._tensors += "), "offload:events_order"),
        ("_plain_torch", Swap("torch.inference_mode(False), ", ""), "offload:autocast"),
        ("_plain_torch", Swap(", on_device, on_host:", ":"), "offload:autocast"),
        ("_Moments.take", Drop("if value.data_ptr()"), "offload:moments"),
    ],
    # pinned memory
    "pinned": [
        ("PinnedMemory._map", Drop("weakref.finalize("), "pinned"),
        ("PinnedMemory._map", Swap(".atexit = False", ""), "pinned"),
        ("PinnedMemory._map", Swap("module.check_error(", "int("), "pinned"),
        ("PinnedMemory._map", Swap("n_bytes, 0)", "n_bytes // 2, 0)"), "pinned"),
        ("PinnedMemory._map", Swap("torch.ones(", "torch.empty("), "gpu:could_not_be_pinned"),
        ("PinnedMemory._map", Drop("for advice in"), "pinned"),
        ("PinnedMemory._map", Drop("_blocks.add("), "pinned"),
        ("_unregister", Drop("module.synchronize("), "pinned"),
    ],
    "core/edge": [
        ("holding_back_weights", Drop("if use.unit.index in use.graph.plan.weightless:"), "ends:otherwise_later"),
        ("call_unit", Swap("outer is not None or", "False or"), "programs"),
        ("call_pass", Drop("args, kwargs = untraced(moved,"), "offload_device:until_inputs"),
    ],
    "nested": [("moved", Swap(", non_blocking=True", ""), "offload_device:until_inputs")],
    "torch_private": [
        ("kept", Drop("if tensor._version != version:"), "ends:tokens"),
        ("saved_as_it_is", Swap(' and getattr(saved, "unpack_hook", data) is None', ""), "lookups:hooks"),
        ("saved_as_it_is", Drop("data = data[0]"), "lookups:models"),
    ],
}

MUTANTS = [Mutant(file, *change) for file, changes in _BY_FILE.items() for change in changes]


def _try(mutant: Mutant, root: Path) -> tuple[str, str]:
    """Whether it is "caught" in this copy of the repository, and by which test."""
    path = root / "streamshard" / f"{mutant.file}.py"
    original = path.read_text()
    try:
        path.write_text(mutant.apply(original))
        return _run_tests([*mutant.test_files, "-k", mutant.tests.partition(":")[2]], root)
    except LookupError as error:
        return "does not apply", str(error)
    finally:
        path.write_text(original)


def _run_tests(arguments: list[str], root: Path) -> tuple[str, str]:
    played = {"TEST_PLAYED_GPU": "cuda"} if "tests/test_gpu.py" in arguments else {}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *arguments],
        cwd=root,
        env={**os.environ, **ENVIRONMENT, **played, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that ranks which hang can be ended with it
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "caught", "a test that hangs"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode == 0:
        return "lived", ""
    if found := re.search(r"^(?:FAILED|ERROR) tests/(?:\w+/)?test_(\w+)\.py(?:::(\w+))?", output, re.MULTILINE):
        return "caught", f"{found[1]}: {found[2] or 'cannot be imported'}"
    if process.returncode == 1:
        return "caught", "a test"
    raise RuntimeError(f"pytest ended with {process.returncode}:\n{output[-2000:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module; 1 if a mutant lived or does not apply."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutants whose function or change has one of these")
    words = parser.parse_args(arguments).words
    mutants = [mutant for mutant in MUTANTS if not words or any(word in str(mutant) for word in words)]
    results = []
    with tempfile.TemporaryDirectory(prefix="mutants_") as directory:
        for name in ("streamshard", "tests"):
            shutil.copytree(ROOT / name, Path(directory, name), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "docs" / "examples", Path(directory, "docs", "examples"))  # which tests run
        shutil.copy(ROOT / "pyproject.toml", directory)
        for number, mutant in enumerate(mutants):
            began = time.monotonic()
            result, why = _try(mutant, Path(directory))
            results.append(result)
            seconds = time.monotonic() - began
            print(f"{number + 1}/{len(mutants)} {seconds:5.1f} s  {result:14}  {mutant}  {why}", flush=True)
    print("\n" + ", ".join(f"{results.count(result)} {result}" for result in ("caught", "lived", "does not apply")))
    return int(results.count("caught") < len(results))


if __name__ == "__main__":
    sys.exit(main())
