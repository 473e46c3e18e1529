"""Small changes that make the engine wrong, one at a time, each of which some test has to notice. Run by hand:

    python -m tests.mutants                    # all of them, a table at the end
    python -m tests.mutants engine settle      # those whose function or change has one of these words

They are about the ordering rules, the bookkeeping of gradients, and publishing. Each is applied to a copy of the
repository in a temporary directory, never to the tree. A mutant names a function and a fragment of one statement in it,
so it survives whatever else changes in that function, and a rename that is made everywhere.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 150.0  # of all tests of one mutant; one that hangs is caught
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",  # which would be taken for that of the next change, of the same size and second
    "STREAMSHARD_TEST_GROUP_TIMEOUT_S": "15",
    "STREAMSHARD_TEST_RUN_TIMEOUT_S": "25",
}


class Drop(NamedTuple):
    """Leave out the one statement that begins with `start`, with its body."""

    start: str

    def apply(self, source: str, function: ast.FunctionDef) -> str:
        """`source` without that statement of `function`."""
        found = [node for node in _statements(function) if _text(source, node).startswith(self.start)]
        if len(found) != 1:
            raise LookupError(f"{len(found)} statements of {function.name} begin with {self.start!r}")
        (node,) = found
        assert node.end_lineno is not None
        lines = source.splitlines(keepends=True)
        return "".join([*lines[: node.lineno - 1], " " * node.col_offset + "pass\n", *lines[node.end_lineno :]])


class Swap(NamedTuple):
    """Replace the one fragment `old` of a function by `new`."""

    old: str
    new: str

    def apply(self, source: str, function: ast.FunctionDef) -> str:
        """`source` with that fragment of `function` replaced."""
        text = _text(source, function)
        if text.count(self.old) != 1:
            raise LookupError(f"{function.name} has {self.old!r} {text.count(self.old)} times")
        return source.replace(text, text.replace(self.old, self.new), 1)


class Mutant(NamedTuple):
    """A change that makes the engine wrong.

    Attributes:
        file: in ``streamshard``, without suffix.
        function: ``name`` or ``Class.name``.
        change: of it.
        tests: those that are likely to notice it, in the order in which they are tried: files of ``tests`` without
            prefix and suffix, or ``file::test``.
    """

    file: str
    function: str
    change: Drop | Swap
    tests: str

    def __str__(self) -> str:
        return f"{self.file}.{self.function}: {self.change}"

    def apply(self, source: str) -> str:
        """The text of the file with this change.

        Raises:
            LookupError: there is no such function in it, or no such place in the function.
        """
        node: ast.AST = ast.parse(source)
        for name in self.function.split("."):
            found = [each for each in ast.iter_child_nodes(node) if getattr(each, "name", None) == name]
            if len(found) != 1:
                raise LookupError(f"{self.file} has {len(found)} {self.function}")
            (node,) = found
        assert isinstance(node, ast.FunctionDef)
        return self.change.apply(source, node)


def _statements(function: ast.FunctionDef) -> Iterator[ast.stmt]:
    yield from (node for node in ast.walk(function) if isinstance(node, ast.stmt) and node is not function)


def _text(source: str, node: ast.AST) -> str:
    text = ast.get_source_segment(source, node)
    assert text is not None
    return text


class Outcome(NamedTuple):
    """What became of a mutant: "caught", "lived" or "does not apply"; by which test; in which time."""

    mutant: Mutant
    result: str
    caught_by: str
    seconds: float


MUTANTS: list[Mutant] = [
    # no `_drain_gathers` before a cast
    Mutant(
        "engine/casts",
        "Casts.cast",
        Drop("self._drain_gathers()"),
        "invariants::test_no_gather_is_under_way_where_weights_are_cast_or_gathered_again matrix",
    ),
    # a cast does not wait for readers
    Mutant("engine/casts", "Casts.cast", Drop("self._await_readers()"), "matrix"),
    # weights of before are reused by the next pass
    Mutant(
        "engine/casts",
        "Casts.cast",
        Drop("unit.weight_slot.content = unit.index if is_alone or not unit.views else None"),
        "graphs",
    ),
    # a pass begins without `settle`
    Mutant(
        "engine/engine",
        "Engine.prepare_forward",
        Drop("self.recover()"),
        "exceptions::test_ranks_that_fail_at_different_points_of_a_backward_stay_in_step",
    ),
    # a step inside `no_sync` is not noticed
    Mutant(
        "engine/casts",
        "Casts.begin_pass",
        Swap("or self._versions != [unit.versions() for unit in self._units]:", ":"),
        "graphs",
    ),
    # weights stay current after `no_sync`
    Mutant(
        "engine/casts",
        "Casts.set_synced",
        Drop("if is_synced:"),
        "invariants::test_weights_changed_behind_torchs_back_after_no_sync_are_seen loops graphs dial",
    ),
    # weights are never current, not even inside `no_sync`
    Mutant(
        "engine/casts",
        "Casts.end_pass",
        Swap("self._are_current = not self.is_synced", "self._are_current = False"),
        "dial",
    ),
    # a failed forward issues nothing
    Mutant(
        "engine/forward",
        "Forward.finish",
        Swap(
            "if error is not None and (engine.ranks.has_failed or not isinstance(error, Exception)):",
            "if error is not None:",
        ),
        "invariants::test_a_forward_that_fails_on_one_rank_issues_what_the_others_do exceptions matrix",
    ),
    # a failed transport still issues what is left of a forward
    Mutant(
        "engine/forward",
        "Forward.finish",
        Swap(
            "if error is not None and (engine.ranks.has_failed or not isinstance(error, Exception)):",
            "if error is not None and not isinstance(error, Exception):",
        ),
        "invariants::test_an_interrupted_or_failed_rank_issues_nothing_more exceptions",
    ),
    # what was issued last is left out at the end of a pass
    Mutant(
        "engine/forward",
        "Forward.finish",
        Swap("self._prefetch(self._schedule.finish())", "self._schedule.finish()"),
        "execution",
    ),
    # an order is adopted that ranks do not agree on
    Mutant(
        "plan/unit_order",
        "join_orders",
        Swap("return None", "return tuple(otherwise)"),
        "invariants::test_an_order_that_ranks_do_not_share_is_not_adopted program",
    ),
    # a unit that is in its slot is gathered all the same
    Mutant("engine/engine", "Engine.all_gather", Swap("if slot.content == unit.index:", "if False:"), "dial"),
    # `acquire` does not gather
    Mutant(
        "engine/engine",
        "Engine.unshard",
        Drop("if unit.weight_slot.content != unit.index:"),
        "matrix::test_the_default_trains_like_plain_pytorch execution",
    ),
    # `acquire` does not wait
    Mutant("engine/engine", "Engine.unshard", Drop("unit.finish_gather()"), "matrix"),
    # other units stay bound in `_advance`
    Mutant(
        "engine/backward",
        "Backward._advance",
        Drop("for other in engine.units[1:]:"),
        "invariants::test_bound_units_are_in_their_slots_and_nothing_is_left_behind matrix",
    ),
    # versions of the root unit are not compared
    Mutant("engine/backward", "Backward.reach", Drop("_refuse_changed(engine.units[index], versions)"), "graphs"),
    # what trains is not asked when backward begins
    Mutant("engine/backward", "Backward.begin", Drop("unit.take_trainability()"), "graphs"),
    # `due` is not filled
    Mutant(
        "engine/backward",
        "Backward.reach",
        Swap("engine.reductions.due = set(visits)", "engine.reductions.due = set()"),
        "unit_size passes",
    ),
    # `due` is not discarded
    Mutant(
        "engine/backward",
        "Backward._issue",
        Drop("self._engine.reductions.due.discard(op.unit)"),
        "invariants::test_bound_units_are_in_their_slots_and_nothing_is_left_behind unit_size passes matrix",
    ),
    # a recomputation does not move the schedule on
    Mutant(
        "engine/backward",
        "Backward._recompute",
        Drop("self._advance(unit)"),
        "invariants::test_gradients_are_on_their_way_while_the_layer_before_is_recomputed",
    ),
    # late gradients are not reduced
    Mutant("engine/backward", "Backward._close_pass", Drop("engine.reductions.start_late_ones()"), "execution passes"),
    # a cleared gradient is not zero
    Mutant(
        "unit/grads",
        "FlatParamGrads.take",
        Drop("if not grad.is_kept:"),
        "invariants::test_a_cleared_gradient_beside_kept_ones_begins_at_zero loops graphs",
    ),
    # `give` drops what autograd has put on the sharded parameter
    Mutant(
        "unit/grads",
        "ParamGrad.give",
        Drop("if grad_of(param) is not None and"),
        "graphs::test_penalties_on_the_parameters_accumulate_with_everything_else",
    ),
    # a gradient that was kept and got nothing new is dropped
    Mutant("unit/grads", "UnitGrads.finish", Swap("(grad.is_kept or is_new)", "is_new"), "loops"),
    # no unit trains
    Mutant("unit/unit", "StreamedUnit.take_trainability", Drop("self.is_trainable = trainable"), "frozen"),
    # a gather does not wait for the slot's last use
    Mutant("unit/unit", "StreamedUnit.start_gather", Drop("slot.released.wait()"), "matrix"),
    # `start_gather` without `arrived.complete()`
    Mutant(
        "unit/unit",
        "StreamedUnit.start_gather",
        Drop("slot.arrived.complete()"),
        "invariants::test_no_gather_is_under_way_where_weights_are_cast_or_gathered_again matrix execution",
    ),
    # gradients of before are taken at each opening
    Mutant(
        "unit/grads",
        "UnitGrads.open",
        Swap("is_first, self._has_taken = not self._has_taken, True", "is_first, self._has_taken = True, True"),
        "passes matrix",
    ),
    # a grad slot is opened without waiting
    Mutant("unit/shard", "GradSlot.open", Drop("self.drained.wait()"), "matrix"),
    # a grad slot is opened as if it held main grads
    Mutant(
        "unit/grads",
        "FlatParamGrads.open",
        Swap("self.set_written(is_added_to)", "self.set_written(self.adds)"),
        "loops",
    ),
    # main grads in the slot are not added to
    Mutant(
        "unit/grads", "FlatParamGrads.open", Swap("self.set_written(is_added_to)", "self.set_written(False)"), "dial"
    ),
    # main grads in the slot count once, not N times
    Mutant(
        "unit/grads",
        "FlatParamGrads._spread_main",
        Swap("chunk.mul_(world_size) if rank", "chunk.mul_(1) if rank"),
        "dial",
    ),
    # spilled gradients are dropped
    Mutant("unit/grads", "UnitGrads.open", Drop("self.write(param_index, spilled)"), "unit_size"),
    # spilled gradients are added again
    Mutant(
        "unit/grads",
        "UnitGrads.open",
        Swap("spilled, grad.spilled = grad.spilled, None", "spilled = grad.spilled"),
        "unit_size",
    ),
    # a used parameter is not noted
    Mutant(
        "unit/grads",
        "UnitGrads.write",
        Swap("grad.is_used = self.has_unreduced = True", "self.has_unreduced = True"),
        "loops",
    ),
    # what came late is not noted
    Mutant(
        "unit/grads",
        "UnitGrads.write",
        Swap("grad.is_used = self.has_unreduced = True", "grad.is_used = True"),
        "passes execution",
    ),
    # a reduction leaves `has_unreduced`
    Mutant(
        "unit/grads",
        "UnitGrads.start_reduce",
        Drop("self.has_unreduced = False"),
        "invariants::test_a_unit_is_averaged_over_replicas_once",
    ),
    # a parameter without a gradient contributes leftovers
    Mutant("unit/grads", "UnitGrads.start_reduce", Drop("grad.in_slot.zero_()"), "execution"),
    # the range of a frozen parameter that holds a gradient is not zeroed
    Mutant(
        "unit/grads",
        "UnitGrads.start_reduce",
        Swap(
            "if (self.counts(grad) or grad.is_kept) and not grad.is_written:",
            "if self.counts(grad) and not grad.is_written:",
        ),
        "invariants::test_a_gradient_frozen_between_micro_batches_stays_as_it_is frozen graphs",
    ),
    # a reduction does not wait for gradients
    Mutant("unit/shard", "GradSlot.finish_writing", Drop("self.written.wait()"), "matrix"),
    # a second stream writes gradients without waiting
    Mutant(
        "unit/shard",
        "GradSlot.join",
        Drop("self.drained.wait()"),
        "simulated_device::test_gradients_that_come_on_other_streams_are_waited_for",
    ),
    # a reduction waits for gradients of one stream
    Mutant(
        "unit/shard",
        "GradSlot.finish_writing",
        Swap("for stream in self._writers or (None,):", "for stream in self._writers[:1] or (None,):"),
        "simulated_device::test_gradients_that_come_on_other_streams_are_waited_for",
    ),
    # fp16 sums are not divided beforehand
    Mutant("comm/nccl", "NcclTransport.start_reduce", Drop("if before > 1:"), "transport::test_means_are_of_the_sum"),
    # `adds` is not set after a first reduction
    Mutant(
        "unit/grads",
        "FlatParamGrads.start_reduce",
        Swap(
            "accumulate, self.adds = self.adds and not self.is_main_in_slot, True",
            "accumulate = self.adds and not self.is_main_in_slot",
        ),
        "passes::test_recomputed_layers_with_several_forwards_and_backwards",
    ),
    # main grads in the slot are added twice
    Mutant(
        "unit/grads",
        "FlatParamGrads.start_reduce",
        Swap(
            "accumulate, self.adds = self.adds and not self.is_main_in_slot, True",
            "accumulate, self.adds = self.adds, True",
        ),
        "dial",
    ),
    # a grad slot that is drained keeps its content
    Mutant(
        "unit/grads",
        "UnitGrads.start_reduce",
        Drop("slot.content = None"),
        "loops execution passes",
    ),
    # scratch does not know who uses it
    Mutant(
        "unit/grads",
        "UnitGrads.start_reduce",
        Drop("slot.scratch.drained = slot.drained"),
        "dial::test_over_sockets_too",
    ),
    # messages under way are freed with whoever let go of them
    Mutant(
        "comm/gloo",
        "_Exchange._abandon",
        Drop("_abandoned.setdefault(self._group, []).extend(self._messages)"),
        "transport::test_messages_that_nobody_waits_for_stop_no_others",
    ),
    # 16-bit chunks are summed by the backend
    Mutant(
        "comm/nccl",
        "NcclTransport.start_reduce",
        Swap("if mode is ReductionMode.EXCHANGE_16:", "if False:"),
        "transport::test_every_transport_has_every_reduction",
    ),
    # what is there to add to is overwritten
    Mutant(
        "comm/nccl",
        "NcclTransport.start_reduce",
        Swap("elif mode is ReductionMode.FP32 and not accumulate:", "elif mode is ReductionMode.FP32:"),
        "transport::test_every_transport_has_every_reduction",
    ),
    # main grads are not zeroed where gradients wait for the first time
    Mutant(
        "unit/grads",
        "UnitGrads.leave_unreduced",
        Drop("flat_param.main.zero_()"),
        "invariants::test_gradients_that_wait_are_not_added_to_those_of_a_step_before",
    ),
    # `leave_unreduced` overwrites what autograd has put there
    Mutant(
        "unit/grads",
        "UnitGrads.leave_unreduced",
        Drop("flat_param.add_own(grad, param.grad)"),
        "graphs::test_penalties_on_the_parameters_accumulate_with_everything_else",
    ),
    # `leave_unreduced` leaves out what only waits
    Mutant(
        "unit/grads",
        "UnitGrads.leave_unreduced",
        Swap("if grad.is_used or grad.is_kept:", "if grad.is_used:"),
        "invariants::test_a_reduced_gradient_can_be_cleared_while_others_of_its_layer_wait",
    ),
    # `resume` keeps what was cleared
    Mutant("unit/grads", "UnitGrads.resume", Drop("grad.forget()"), "dial"),
    # `forget` leaves the slot
    Mutant("unit/grads", "ParamGrad.forget", Drop("self.in_slot.zero_()"), "dial graphs"),
    # `forget` leaves the main grads
    Mutant(
        "unit/grads",
        "ParamGrad.forget",
        Drop("self.clear()"),
        "invariants::test_clearing_forgets_what_was_reduced_and_what_waits dial graphs",
    ),
    # what autograd gives to a sharded parameter counts once, not N times
    Mutant(
        "unit/grads",
        "FlatParamGrads.add_own",
        Swap("add_(own, alpha=self._plan.layout.world_size)", "add_(own)"),
        "graphs",
    ),
    # a backward leaves `has_unreduced`
    Mutant(
        "unit/grads",
        "UnitGrads.finish",
        Drop("self.has_unreduced = False"),
        "invariants::test_an_interrupt_while_a_failed_backward_is_left_leaves_nothing",
    ),
    # a backward leaves `used`
    Mutant("unit/grads", "UnitGrads.finish", Drop("grad.is_used = False"), "execution loops"),
    # a backward leaves `_has_taken`
    Mutant(
        "unit/grads",
        "UnitGrads.finish",
        Swap("self._has_taken = self.waits = False", "self.waits = False"),
        "loops",
    ),
    # an average is not awaited before a gradient is taken
    Mutant(
        "engine/reductions",
        "Reductions.take",
        Drop("self.replicas.finish_average(unit)"),
        "invariants::test_gradients_in_parts_do_not_meet_their_average",
    ),
    # an average is not awaited before a slot is opened
    Mutant("engine/reductions", "Reductions._open", Drop("self.replicas.finish_average(unit)"), "replicas"),
    # what is due is reduced at once
    Mutant("engine/reductions", "Reductions._open", Swap("if earlier.index in self.due:", "if False:"), "unit_size"),
    # what is not due is spilled
    Mutant(
        "engine/reductions",
        "Reductions._open",
        Swap("if earlier.index in self.due:", "if True:"),
        "invariants::test_gradients_that_come_late_are_reduced_where_another_unit_needs_their_slot",
    ),
    # a unit without gradients reduces another's
    Mutant("engine/reductions", "Reductions.start", Drop("self._open(unit)"), "execution"),
    # a reduction is not remembered
    Mutant(
        "engine/reductions",
        "Reductions.start",
        Drop("self._under_way.append(work)"),
        "loops::test_gradients_accumulate_over_micro_batches",
    ),
    # the optimizer does not wait
    Mutant("engine/reductions", "Reductions.complete", Drop("self._done.wait()"), "matrix"),
    # flags of used parameters are not awaited
    Mutant(
        "engine/reductions",
        "UsedParams.finish",
        Drop("self._arrived[0].wait()"),
        "invariants::test_a_layer_that_no_rank_has_run_has_no_gradient_however_late_flags_are matrix execution",
    ),
    # flags of replicas are not awaited
    Mutant("engine/reductions", "UsedParams.finish", Drop("self._arrived[stage].wait()"), "replicas"),
    # flags are sent before they are written
    Mutant("engine/reductions", "UsedParams._start", Drop("self._written[stage].wait()"), "matrix"),
    # flags that have changed are not written
    Mutant(
        "engine/reductions", "UsedParams.start", Drop("self._flags[0].copy_(told, non_blocking=is_remote)"), "execution"
    ),
    # an average without rule 4
    Mutant(
        "engine/replicas",
        "Replicas.flush",
        Drop("self._written.record()"),
        "invariants::test_replicas_of_whole_models_are_free_of_races replicas",
    ),
    # an average does not wait for its reduction
    Mutant("engine/replicas", "Replicas.flush", Drop("self._reduced.wait()"), "replicas"),
    # the last unit is not averaged
    Mutant("engine/replicas", "Replicas.finish", Drop("self.flush()"), "replicas"),
    # more gradients do not wait for an average under way
    Mutant(
        "engine/replicas",
        "Replicas.finish_average",
        Swap("self._under_way.pop(unit.index).wait()", "self._under_way.pop(unit.index)"),
        "replicas",
    ),
    # where a reduction ends is not recorded
    Mutant("engine/replicas", "Replicas.add", Drop("self._reduced.record(reduction)"), "replicas"),
    # the optimizer does not wait for averages
    Mutant(
        "engine/replicas",
        "Replicas.finish",
        Swap("for averaged in under_way.values():", "for _ in under_way.values():"),
        "replicas",
    ),
    # an average starts with the next unit's reduction on accelerators too
    Mutant(
        "engine/replicas",
        "Replicas.add",
        Drop("if reduction is None:"),
        "simulated_device::test_an_average_starts_at_once",
    ),
    # a slot is free one visit early
    Mutant(
        "plan/program",
        "plan_steps",
        Swap("free_at[slot_of[unit]] = visit + 1", "free_at[slot_of[unit]] = visit"),
        "program",
    ),
    # a unit is reduced before its last visit is over
    Mutant(
        "plan/program",
        "plan_steps",
        Swap("steps[visit + 1].append", "steps[visit].append"),
        "program",
    ),
    # the step of the visit that is asked for is not issued
    Mutant(
        "plan/program",
        "Schedule.release_before",
        Swap("self._issued_steps : self.released + 1", "self._issued_steps : self.released"),
        "program",
    ),
    # the end of a schedule leaves its last step out
    Mutant(
        "plan/program",
        "Schedule.finish",
        Swap("return self.release_before(len(self.visits))", "return self.release_before(len(self.visits) - 1)"),
        "program",
    ),
    # gradients of a layer that is frozen while they wait are not reduced
    Mutant(
        "unit/grads",
        "UnitGrads.leave_unreduced",
        Drop("self.waits = self.waits or has_trained"),
        "dial::test_gradients_of_layers_that_are_frozen_while_they_wait_stay",
    ),
    # what has waited waits for ever
    Mutant(
        "unit/grads",
        "UnitGrads.finish",
        Swap("self._has_taken = self.waits = False", "self._has_taken = False"),
        "invariants::test_a_layer_frozen_after_its_gradient_waited_is_not_reduced",
    ),
    # a rank that had no part in a gradient that waits does not hear of it
    Mutant(
        "engine/reductions",
        "UsedParams.finish",
        Swap("not unit.grads.counts(grad)", "not grad.view.requires_grad"),
        "dial::test_gradients_of_layers_that_are_frozen_while_they_wait_stay",
    ),
    # only a unit's first flat parameter is reduced
    Mutant(
        "unit/grads",
        "UnitGrads.start_reduce",
        Swap(
            "[flat_param.start_reduce() for flat_param in self.flat_params]",
            "[flat_param.start_reduce() for flat_param in self.flat_params[:1]]",
        ),
        "fp32_modules",
    ),
    # a backward that was left is not issued to its end
    Mutant("engine/backward", "Backward.recover", Drop("self._close_pass()"), "exceptions invariants"),
    # a backward that was left is not waited for
    # a pass that is over moves the schedule of another on
    Mutant("engine/backward", "Backward.need", Swap("use.graph is self.graph and", "True and"), "invariants"),
    # a graph through weights that have changed since is not refused
    Mutant("engine/backward", "_refuse_changed", Swap("raise ", "return "), "graphs"),
    # checkpoints are ordered by number, not by generation
    Mutant(
        "checkpoint/directory",
        "newest_last",
        Swap("manifest.generation, manifest.number,", "manifest.number, manifest.generation,"),
        "directory::test_the_last_save_is_the_latest_whatever_clocks_and_numbers_say",
    ),
    # a checkpoint whose files are cut off is the latest
    Mutant("checkpoint/directory", "_read_whole", Drop("check_sizes(path, manifest)"), "directory"),
    # one checkpoint too many is deleted
    Mutant(
        "checkpoint/directory",
        "publish_checkpoint",
        Swap("len(own) + 1 - keep", "len(own) + 2 - keep"),
        "directory",
    ),
    # what cannot be deleted after publishing raises
    Mutant(
        "checkpoint/directory",
        "publish_checkpoint",
        Swap("except OSError as error:", "except ZeroDivisionError as error:"),
        "directory restore",
    ),
    # the partial directory of a run that is saving is deleted
    Mutant(
        "checkpoint/directory",
        "_delete_unless_locked",
        Swap("if not _lock(manifest.fileno()):", "if False:"),
        "directory",
    ),
    # the file that an export no longer needs stays
    Mutant("checkpoint/export", "_publish", Drop("(root / other).unlink(missing_ok=True)"), "publish"),
    # numbered files of exports have the same names
    Mutant("checkpoint/export", "_create", Swap('f"model-{token}-"', 'f"model-{8 * chr(48)}-"'), "publish"),
]


def try_mutants(mutants: Sequence[Mutant]) -> list[Outcome]:
    """Apply each to a copy of the repository, and run its tests there; says what it does on standard error."""
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="mutants_") as directory:
        for name in ("streamshard", "tests", "pyproject.toml"):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, Path(directory, name), ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, directory)
        for number, mutant in enumerate(mutants):
            outcome = _try(mutant, Path(directory))
            outcomes.append(outcome)
            print(
                f"{number + 1}/{len(mutants)} {outcome.seconds:5.1f} s  {outcome.result:14}  {mutant}  "
                f"{outcome.caught_by}",
                file=sys.stderr,
                flush=True,
            )
    return outcomes


def _try(mutant: Mutant, root: Path) -> Outcome:
    path = root / "streamshard" / f"{mutant.file}.py"
    original = path.read_text()
    try:
        changed = mutant.apply(original)
    except LookupError as error:
        return Outcome(mutant, "does not apply", str(error), 0.0)
    path.write_text(changed)
    began = time.monotonic()
    try:
        result, caught_by = _run_tests(mutant, root)
    finally:
        path.write_text(original)
    return Outcome(mutant, result, caught_by, time.monotonic() - began)


def named_tests(mutant: Mutant, root: Path) -> list[tuple[Path, str]]:
    """The tests that are likely to notice it: files, below `root`, and names, empty for all of a file."""
    nodes = [node.partition("::") for node in mutant.tests.split()]
    return [(_path_of(file, root), test) for file, _, test in nodes]


def _run_tests(mutant: Mutant, root: Path) -> tuple[str, str]:
    files = [f"{path}::{test}" if test else str(path) for path, test in named_tests(mutant, root)]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *files],
        cwd=root,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(root)},
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


def _path_of(name: str, root: Path) -> Path:
    (path,) = (root / "tests").rglob(f"test_{name}.py")
    return path.relative_to(root)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module; 1 if a mutant lived or does not apply."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutants whose function or change has one of these")
    options = parser.parse_args(arguments)
    outcomes = try_mutants([m for m in MUTANTS if not options.words or any(w in str(m) for w in options.words)])
    for outcome in outcomes:
        print(f"{outcome.result:14}  {outcome.mutant}  {outcome.caught_by}")
    counts = {result: sum(o.result == result for o in outcomes) for result in ("caught", "lived", "does not apply")}
    print("\n" + ", ".join(f"{count} {result}" for result, count in counts.items()))
    return int(counts["caught"] < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
