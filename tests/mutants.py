"""Small changes to the engine, one at a time, each of which some test has to notice. Run by hand:

    python -m tests.mutants                    # all of them, a table at the end
    python -m tests.mutants engine settle      # those whose file or description has one of these words
    python -m tests.mutants --markdown         # the table as it is in docs/internals/mutants.md

Each is applied to a copy of the repository in a temporary directory, never to the tree. A mutant whose old text is not
in its file exactly once is an error: the code has moved on, and the list has to follow.
"""

from __future__ import annotations

import argparse
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
    "STREAMSHARD_TEST_GROUP_TIMEOUT_S": "15",
    "STREAMSHARD_TEST_RUN_TIMEOUT_S": "25",
}


# Some of a file's tests, where all of them take minutes.
GROUPS = {
    "dial": (
        "dial::test_zero_1_reduces_once_for_all_micro_batches dial::test_more_weight_slots_save_gathers "
        "dial::test_waiting_gradients_are_added_to_those_that_were_there "
        "dial::test_clearing_gradients_inside_no_sync_forgets_them dial::test_gradients_that_wait_cannot_be_used "
        "dial::test_a_failed_micro_batch_can_be_cleared"
    ),
}


class Mutant(NamedTuple):
    """A change that makes the engine wrong.

    Attributes:
        file: in ``streamshard``, without suffix.
        what: one line.
        old: what is replaced, once in the file.
        new: by what.
        tests: those that are likely to notice it, in the order in which they are tried: files of ``tests`` without
            prefix and suffix, or names of `GROUPS`.
    """

    file: str
    what: str
    old: str
    new: str
    tests: str


class Outcome(NamedTuple):
    """What became of a mutant: "caught", "lived" or "does not apply"; by which test; in which time."""

    mutant: Mutant
    result: str
    caught_by: str
    seconds: float


MUTANTS: list[Mutant] = [
    # -- engine: forward
    Mutant(
        "engine/casts",
        "no `_drain_gathers` before a cast",
        "        self._drain_gathers()\n        self._await_readers()\n        is_alone",
        "        self._await_readers()\n        is_alone",
        "invariants::test_no_gather_is_under_way_where_weights_are_cast_or_gathered_again matrix",
    ),
    Mutant(
        "engine/casts",
        "a cast does not wait for readers",
        "        self._drain_gathers()\n        self._await_readers()\n        is_alone",
        "        self._drain_gathers()\n        is_alone",
        "matrix",
    ),
    Mutant(
        "engine/casts",
        "weights of before are reused by the next pass",
        "                unit.weight_slot.content = unit.index if is_alone or not unit.views else None\n",
        "                pass\n",
        "cases_graphs",
    ),
    Mutant(
        "engine/engine",
        "a pass begins without `settle`",
        "        self.settle()\n        refuse_transforms()",
        "        refuse_transforms()",
        "cases_exceptions::test_ranks_that_fail_at_different_points_of_a_backward_stay_in_step",
    ),
    Mutant(
        "engine/engine",
        "buffers are sent inside `no_sync`",
        "trains = torch.is_grad_enabled() and self.casts.is_synced\n",
        "trains = torch.is_grad_enabled()\n",
        "buffer_sync",
    ),
    Mutant(
        "engine/casts",
        "a step inside `no_sync` is not noticed",
        " or self._versions != [unit.versions() for unit in self._units]:",
        ":",
        "cases_graphs",
    ),
    Mutant(
        "engine/casts",
        "weights stay current after `no_sync`",
        "        if is_synced:\n            self._are_current = False\n",
        "",
        "invariants::test_weights_changed_behind_torchs_back_after_no_sync_are_seen cases_training cases_graphs dial",
    ),
    Mutant(
        "engine/casts",
        "weights are never current, not even inside `no_sync`",
        "        self._are_current = not self.is_synced\n\n",
        "        self._are_current = False\n\n",
        "dial",
    ),
    Mutant(
        "engine/engine",
        "a failed forward issues nothing",
        "        if error is not None and (self.ranks.has_failed or not isinstance(error, Exception)):\n",
        "        if error is not None:\n",
        "invariants::test_a_forward_that_fails_on_one_rank_issues_what_the_others_do cases_exceptions matrix",
    ),
    Mutant(
        "engine/engine",
        "a failed transport still issues what is left of a forward",
        "        if error is not None and (self.ranks.has_failed or not isinstance(error, Exception)):\n",
        "        if error is not None and not isinstance(error, Exception):\n",
        "invariants::test_who_cannot_go_on_issues_nothing_more cases_exceptions",
    ),
    Mutant(
        "engine/engine",
        "a KeyboardInterrupt still issues what is left of a forward",
        "        if error is not None and (self.ranks.has_failed or not isinstance(error, Exception)):\n",
        "        if error is not None and self.ranks.has_failed:\n",
        "invariants::test_who_cannot_go_on_issues_nothing_more cases_exceptions",
    ),
    Mutant(
        "engine/engine",
        "what was issued last is left out at the end of a pass",
        "        self._issue(forward.schedule.finish())\n        self.casts",
        "        forward.schedule.finish()\n        self.casts",
        "cases_execution",
    ),
    Mutant(
        "engine/casts",
        "fp32 weights are not retracted at the end of a pass",
        "            self._drain_gathers()\n            self._await_readers()\n",
        "            self._drain_gathers()\n",
        "cases_edits::test_edits_after_an_evaluation_are_not_seen_by_ranks_that_are_still_at_it",
    ),
    Mutant(
        "engine/engine",
        "layers stay bound after a forward that failed",
        "        for unit in self.units:\n            if unit.is_bound:\n                unit.release()\n"
        "        if error",
        "        if error",
        "cases_exceptions",
    ),
    Mutant(
        "engine/engine",
        "the edge unit's edits are not kept",
        "                for index in (EDGE, *sorted(forward.read)):\n",
        "                for index in sorted(forward.read):\n",
        "edits",
    ),
    Mutant(
        "engine/engine",
        "no cast after edits",
        "            self.casts.cast()  # backward computes",
        "            pass  # backward computes",
        "edits::test_backward_computes_with_what_a_forward_has_written",
    ),
    Mutant(
        "engine/engine",
        "an order is adopted that ranks do not agree on",
        "            if len(orders) == 1 and order is not None:\n",
        "            if order is not None:\n",
        "invariants::test_an_order_that_ranks_do_not_share_is_not_adopted cases_execution",
    ),
    Mutant(
        "engine/engine",
        "a pass that never read a weight stays entered",
        "            self._begin_if_entering()\n        self._entering = None\n",
        "            self._begin_if_entering()\n",
        "invariants::test_a_pass_that_never_began_is_over cases_exceptions",
    ),
    Mutant(
        "engine/engine",
        "a pass that could not begin stays entered",
        "            self.depth -= 1\n            self._forward = self._entering = None\n",
        "            self._forward = self._entering = None\n",
        "invariants::test_a_pass_that_never_began_is_over cases_exceptions bad_input",
    ),
    Mutant(
        "engine/engine",
        "a layer around a layer goes on without its weights",
        "            self._reach(forward, outer.unit)\n            self._bind(outer)\n",
        "            pass\n",
        "edits::test_backward_computes_with_what_a_forward_has_written",
    ),
    Mutant(
        "engine/engine",
        "`post_forward` releases in backward",
        "            backward.running.pop()\n",
        "            backward.running.pop()\n            member.unit.release()\n",
        "invariants::test_who_is_bound_is_in_its_slot_and_nothing_is_left_behind cases_passes",
    ),
    Mutant(
        "engine/engine",
        "what trains is not asked when a layer is bound",
        "        unit.take_trainability()\n        self.edits.restore(unit)\n",
        "        self.edits.restore(unit)\n",
        "cases_freezing cases_graphs",
    ),
    Mutant(
        "engine/engine",
        "what a pass has changed is not there when a unit comes again",
        "        self.edits.restore(unit)\n",
        "",
        "edits::test_changes_in_param_dtype_leave_what_they_do_not_touch",
    ),
    Mutant(
        "engine/engine",
        "a unit's edits are not forgotten when it is bound",
        "        self.edits.restore(unit)\n        unit.forget_edits()\n",
        "        self.edits.restore(unit)\n",
        "invariants::test_who_is_bound_is_in_its_slot_and_nothing_is_left_behind edits",
    ),
    Mutant(
        "engine/engine",
        "a layer frozen in its own forward thaws",
        "        unit.give_trainability()\n",
        "",
        "cases_graphs cases_freezing",
    ),
    Mutant(
        "engine/engine",
        "a slot's holder is not released",
        "                self._take_edits(self.units[holder])\n            self.units[holder].release()\n",
        "                self._take_edits(self.units[holder])\n",
        "invariants::test_who_is_bound_is_in_its_slot_and_nothing_is_left_behind away matrix cases_passes",
    ),
    Mutant(
        "engine/engine",
        "a unit that is in its slot is gathered all the same",
        "            elif unit.weight_slot.content != unit.index:\n",
        "            else:\n",
        "dial",
    ),
    Mutant(
        "engine/engine",
        "`acquire` does not gather",
        "        if unit.weight_slot.content != unit.index:\n            self._gather(unit)\n        with",
        "        with",
        "cases_execution",
    ),
    Mutant(
        "engine/engine",
        "`acquire` does not wait",
        "            unit.finish_gather()\n",
        "            pass\n",
        "matrix",
    ),
    # -- engine: weights that are borrowed
    Mutant(
        "engine/borrow",
        "a layer that had to leave for a borrowed unit does not come back",
        "    evicted = [member for member in holder.members if member.is_bound] if holder is not None else []\n",
        "    evicted: list[Member] = []\n",
        "away::test_a_layer_that_had_to_leave_for_a_borrowed_weight_comes_back",
    ),
    Mutant(
        "engine/borrow",
        "a borrowed unit is not noted for backward",
        "        engine.depart(unit)\n",
        "",
        "away::test_reading_weights_costs_no_reduction",
    ),
    Mutant(
        "engine/borrow",
        "what trains is not asked of a borrowed unit",
        "        unit.take_trainability()\n",
        "",
        "away::test_a_layer_that_is_only_read_thaws",
    ),
    Mutant(
        "engine/borrow",
        "a borrowed slot is given back without a record",
        "        self.unit.weight_slot.released.record()\n",
        "",
        "invariants::test_weights_read_elsewhere_are_free_of_races away",
    ),
    Mutant(
        "engine/engine",
        "a borrowed unit is not among the pass's",
        "            forward.pass_.borrowed.add(unit.index)\n",
        "",
        "away::test_reading_weights_costs_no_reduction",
    ),
    Mutant(
        "engine/engine",
        "a gradient of a borrowed unit ends the turn of the one that computes",
        "            if unit.takes_turns and not is_borrowed:\n",
        "            if unit.takes_turns:\n",
        "away::test_reading_weights_costs_no_reduction",
    ),
    Mutant(
        "engine/engine",
        "what is written to a weight that was read is not kept",
        "                for index in (EDGE, *sorted(forward.read)):\n",
        "                for index in (EDGE,):\n",
        "large_units::test_however_it_is_used_it_trains_like_plain_pytorch",
    ),
    Mutant(
        "engine/engine",
        "what was read is not compared in backward",
        "        forward.pass_.versions.setdefault(unit.index, unit.versions())\n",
        "",
        "large_units::test_weights_changed_between_a_forward_and_its_backward_raise",
    ),
    Mutant(
        "engine/engine",
        "a layer that calls a large module ends its turn",
        "        is_inside = bool(forward.running) and not unit.takes_turns\n",
        "        is_inside = False\n",
        "large_units::test_each_is_gathered_and_reduced_once_in_a_step",
    ),
    Mutant(
        "engine/engine",
        "a unit that stays ends the turns before its own in backward",
        "        if not unit.takes_turns and visit > backward.schedule.released",
        "        if False and visit > backward.schedule.released",
        "large_units::test_ranks_may_have_images_or_not",
    ),
    Mutant(
        "plan/program",
        "what stays is not gathered first before the order is known",
        "    return tuple(sorted(range(len(turns)), key=turns.__getitem__))\n",
        "    return tuple(range(len(turns)))\n",
        "program large_units::test_ranks_may_leave_early_at_different_layers",
    ),
    Mutant(
        "plan/program",
        "a unit that stays departs when it is used again",
        "        if visit is None and not self._turns[unit] and unit in self.visits:\n            return []\n",
        "",
        "program large_units::test_ranks_may_leave_early_at_different_layers",
    ),
    Mutant(
        "engine/away",
        "a weight that stays is read before it has arrived",
        "        read(self.engine, self.unit)\n",
        "",
        "large_units::test_however_it_is_used_it_trains_like_plain_pytorch",
    ),
    Mutant(
        "build",
        "large modules of one class take turns in the layers' slots",
        "not unit.is_lone and all(kinds",
        "all(kinds",
        "large_units::test_modules_of_one_class_have_a_slot_each",
    ),
    Mutant(
        "plan/detection",
        "embeddings outside of units warn",
        "    loose = set(outside) - embeddings - tied\n",
        "    loose = set(outside) - tied\n",
        "detection::test_embeddings_outside_of_units_warn_nobody",
    ),
    Mutant(
        "plan/detection",
        "the layers of each stage are a list of their own",
        "        yield [layer for stage in layers for inner in _find_lists(stage, taken) for layer in inner]\n",
        "        for stage in layers:\n            yield from _find_lists(stage, taken)\n",
        "detection::test_every_large_list_of_a_transformers_model_is_found",
    ),
    Mutant(
        "adapters",
        "the base model is gathered to save adapters",
        "if shard.param.requires_grad or shard.param in own or id(metas[shard.name]) in used\n",
        "\n",
        "peft::test_saving_gathers_adapters_only",
    ),
    Mutant(
        "plan/detection",
        "a module whose weight another one keeps in a list is large",
        "                and all(users[param] <= within for param in params_of(child).values())\n",
        "",
        "large_units::test_what_is_large_beside_the_layers_is_a_unit",
    ),
    # -- engine: backward
    Mutant(
        "engine/engine",
        "a first gradient without `_advance`",
        "and not is_borrowed:\n                self._advance(backward, unit)\n",
        "and not is_borrowed:\n                pass\n",
        "invariants::test_a_gradient_that_comes_unannounced_ends_the_turns_before_it cases_values cases_graphs",
    ),
    Mutant(
        "engine/engine",
        "other units stay bound in `_advance`",
        "        for other in self.units[1:]:\n            if other.is_bound and other is not unit:\n"
        "                other.release()\n",
        "",
        "invariants::test_who_is_bound_is_in_its_slot_and_nothing_is_left_behind matrix",
    ),
    Mutant(
        "engine/engine",
        "`need` ignores whether the unit is bound",
        "        if backward is not None and backward.computing is unit and unit.is_bound and not use.is_borrowed:\n",
        "        if backward is not None and backward.computing is unit and not use.is_borrowed:\n",
        "away::test_a_layer_finds_its_weights_again_in_backward",
    ),
    Mutant(
        "engine/engine",
        "`need` ignores that it is borrowed",
        "        if backward is not None and backward.computing is unit and unit.is_bound and not use.is_borrowed:\n",
        "        if backward is not None and backward.computing is unit and unit.is_bound:\n",
        "away::test_a_weight_that_was_read_and_changed_since_raises",
    ),
    Mutant(
        "engine/engine",
        "what is borrowed moves the schedule on",
        "            if backward is not None and use.pass_ is backward.pass_ and not use.is_borrowed:\n",
        "            if backward is not None and use.pass_ is backward.pass_:\n",
        "away::test_reading_weights_costs_no_reduction",
    ),
    Mutant(
        "engine/engine",
        "a pass that is over moves the schedule of another on",
        "            if backward is not None and use.pass_ is backward.pass_ and not use.is_borrowed:\n",
        "            if backward is not None and not use.is_borrowed:\n",
        "invariants::test_a_pass_that_backward_has_left_is_not_begun_again",
    ),
    Mutant(
        "engine/engine",
        "versions of a unit are not compared",
        "            self.begin_backward(use.pass_)\n            self._check_versions(unit, use.versions)\n",
        "            self.begin_backward(use.pass_)\n",
        "cases_graphs::test_weights_changed_between_a_forward_and_its_backward_raise",
    ),
    Mutant(
        "engine/engine",
        "versions of the edge unit are not compared",
        "            self._check_versions(self.units[index], versions)\n",
        "            pass\n",
        "cases_graphs",
    ),
    Mutant(
        "engine/engine",
        "passes that a backward has been through are forgotten",
        "            backward.closed.append(backward.pass_)\n",
        "",
        "invariants::test_a_pass_that_backward_has_left_is_not_begun_again",
    ),
    Mutant(
        "engine/engine",
        "a pass is left without closing it",
        "            backward.closed.append(backward.pass_)\n            self._close_all(backward)\n",
        "            backward.closed.append(backward.pass_)\n",
        "cases_execution::test_ranks_may_run_different_layers_in_graphs_that_are_used_twice",
    ),
    Mutant(
        "engine/engine",
        "gradients never wait in their slots",
        "        return self.plan.keeps_grads and not self.casts.is_synced and not self.is_alone\n",
        "        return False\n",
        "dial",
    ),
    Mutant(
        "engine/engine",
        "what trains is not asked when backward begins",
        "            unit.take_trainability()\n            if self.plan",
        "            if self.plan",
        "cases_graphs",
    ),
    Mutant(
        "engine/engine",
        "waiting gradients are not resumed",
        "                unit.grads.resume()\n",
        "                pass\n",
        "dial",
    ),
    Mutant(
        "engine/engine",
        "the edge unit is not acquired when backward begins",
        "        self.acquire(self.edge)\n        self.edge.bind()\n",
        "        self.edge.bind()\n",
        "invariants::test_backward_gathers_anew_what_a_forward_has_written",
    ),
    Mutant(
        "engine/engine",
        "the edge unit is not bound when backward begins",
        "        self.acquire(self.edge)\n        self.edge.bind()\n",
        "        self.acquire(self.edge)\n",
        "cases_passes::test_parameters_in_lists_are_whole_in_a_recomputation",
    ),
    Mutant(
        "engine/engine",
        "`due` is not filled",
        "        self.reductions.due = set(visits)\n",
        "        self.reductions.due = set()\n",
        "coalesce cases_passes",
    ),
    Mutant(
        "engine/engine",
        "`due` is not discarded",
        "                self.reductions.due.discard(op.unit)\n",
        "",
        "invariants::test_who_is_bound_is_in_its_slot_and_nothing_is_left_behind coalesce cases_passes matrix",
    ),
    Mutant(
        "engine/engine",
        "gradients that are to wait are reduced",
        "                if self._backward is None or not self._backward.leaves_unreduced:\n"
        "                    self.reductions.start(unit)\n",
        "                self.reductions.start(unit)\n",
        "dial",
    ),
    Mutant(
        "engine/engine",
        "a recomputation does not move the schedule on",
        "                self._advance(backward, unit)\n        self.acquire(unit)\n        unit.bind()\n",
        "                pass\n        self.acquire(unit)\n        unit.bind()\n",
        "invariants::test_gradients_are_on_their_way_while_the_layer_before_is_recomputed",
    ),
    Mutant(
        "engine/engine",
        "a recomputation is one visit late",
        "            start = schedule.released + (backward.computing is not None)\n",
        "            start = schedule.released\n",
        "invariants::test_gradients_are_on_their_way_while_the_layer_before_is_recomputed",
    ),
    Mutant(
        "engine/engine",
        "late gradients are not reduced",
        "            self.reductions.start_late_ones()\n",
        "            pass\n",
        "cases_execution cases_passes",
    ),
    Mutant(
        "engine/engine",
        "units stay bound when a schedule is over",
        "        for unit in self.units[1:]:\n"
        "            if unit.is_bound:\n"
        "                unit.release()\n"
        "        backward.computing = None\n",
        "        backward.computing = None\n",
        "cases_graphs",
    ),
    Mutant(
        "engine/engine",
        "the last unit still computes when a schedule is over",
        "                unit.release()\n        backward.computing = None\n",
        "                unit.release()\n",
        "invariants::test_backward_begins_anew_in_each_pass",
    ),
    Mutant(
        "engine/engine",
        "the edge unit stays bound after a backward",
        "        if self._forward is None:\n            self.edge.release()\n",
        "",
        "cases_graphs",
    ),
    Mutant(
        "engine/engine",
        "a backward inside a forward releases the edge unit",
        "        if self._forward is None:\n            self.edge.release()\n",
        "        self.edge.release()\n",
        "cases_passes::test_a_forward_may_differentiate_an_earlier_one",
    ),
    Mutant(
        "engine/engine",
        "hooks of sharded parameters see weights that are away",
        "        self._is_delivering = True\n",
        "",
        "invariants::test_hooks_that_get_gradients_see_the_sharded_parameters optimizers cases_graphs",
    ),
    Mutant(
        "engine/engine",
        "versions of a unit are compared before its pass is swept",
        "            self.begin_backward(use.pass_)\n            self._check_versions(unit, use.versions)\n",
        "            self._check_versions(unit, use.versions)\n            self.begin_backward(use.pass_)\n",
        "random_programs::test_what_random_programs_have_found",
    ),
    Mutant(
        "unit/step_grads",
        "a step is not noticed where a rank has no element of what it writes",
        "        written.append(param)\n",
        "        if param.numel():\n            written.append(param)\n",
        "cases_graphs::test_a_step_is_seen_by_ranks_that_have_no_part_of_what_it_writes",
    ),
    Mutant(
        "engine/hooks",
        "a layer in which all units are is taken for the model",
        "handle.units, is_whole=handle.is_root))\n",
        "handle.units, is_whole=len(handle.units) == len(engine.units)))\n",
        "random_programs::test_what_random_programs_have_found",
    ),
    Mutant(
        "unit/grads",
        "hooks hear of gradients that are kept",
        "                if is_new:\n                    given.append(param)\n",
        "                given.append(param)\n",
        "random_programs::test_what_random_programs_have_found",
    ),
    Mutant(
        "unit/grads",
        "what is frozen has no node while its gradient waits",
        "        param.requires_grad_(True)  # a frozen",
        "        # a frozen",
        "random_programs::test_what_random_programs_have_found",
    ),
    # -- engine: settle
    Mutant(
        "engine/grad_inputs",
        "engines do not hear that a backward has failed",
        "                    engine.fail_backward(error)\n",
        "                    pass\n",
        "cases_exceptions::test_after_an_exception_an_earlier_forward_may_be_differentiated",
    ),
    Mutant(
        "engine/engine",
        "a failed backward is settled when the next pass begins",
        "        if isinstance(error, Exception):\n            self.settle()\n",
        "",
        "random_programs::test_what_random_programs_have_found",
    ),
    Mutant(
        "engine/engine",
        "a backward begins without `settle`",
        "        self.settle()\n        self._widen()\n",
        "        self._widen()\n",
        "cases_exceptions::test_after_an_exception_an_earlier_forward_may_be_differentiated",
    ),
    Mutant(
        "unit/grads",
        "`settle` leaves a grad slot's content",
        "        if self.slot is not None:\n            self.slot.content = None\n",
        "",
        "invariants::test_an_interrupt_while_a_failed_backward_is_left_leaves_nothing",
    ),
    Mutant(
        "unit/grads",
        "`settle` leaves `used`",
        "        self.finish([False] * len(self.params))\n",
        "",
        "invariants::test_who_is_bound_is_in_its_slot_and_nothing_is_left_behind cases_exceptions matrix",
    ),
    Mutant(
        "engine/engine",
        "`settle` does not close the schedule",
        "                self._close_all(backward)\n"
        "                self._reduce_edge(backward)\n"
        "                self.reductions.complete()\n",
        "                self._reduce_edge(backward)\n                self.reductions.complete()\n",
        "invariants::test_who_is_bound_is_in_its_slot_and_nothing_is_left_behind cases_exceptions",
    ),
    Mutant(
        "engine/engine",
        "`settle` does not reduce the edge unit",
        "                self._close_all(backward)\n"
        "                self._reduce_edge(backward)\n"
        "                self.reductions.complete()\n",
        "                self._close_all(backward)\n                self.reductions.complete()\n",
        "cases_exceptions::test_gradients_of_before_stay_when_a_backward_fails",
    ),
    Mutant(
        "engine/engine",
        "`settle` does not wait",
        "                self._close_all(backward)\n"
        "                self._reduce_edge(backward)\n"
        "                self.reductions.complete()\n",
        "                self._close_all(backward)\n                self._reduce_edge(backward)\n",
        "invariants::test_who_is_bound_is_in_its_slot_and_nothing_is_left_behind cases_exceptions matrix",
    ),
    Mutant(
        "engine/engine",
        "`settle` forgets gradients that wait",
        "                if backward.leaves_unreduced:\n"
        "                    unit.grads.leave_unreduced(has_trained=unit.is_trainable)\n"
        "                else:\n"
        "                    unit.grads.give_up()\n",
        "                unit.grads.give_up()\n",
        "cases_exceptions::test_gradients_of_before_stay_when_a_backward_fails",
    ),
    # -- shard
    Mutant(
        "unit/grads",
        "a cleared gradient is not zero",
        "                if not grad.is_kept:\n                    grad.in_main.zero_()\n",
        "                pass\n",
        "invariants::test_a_cleared_gradient_beside_kept_ones_begins_at_zero cases_training cases_graphs",
    ),
    Mutant(
        "unit/grads",
        "a gradient that the user replaced is not copied",
        "            if grad.data_ptr() != self.in_main.data_ptr():\n                self.in_main.copy_(grad)\n",
        "",
        "cases_edits",
    ),
    Mutant(
        "unit/grads",
        "a gradient that is kept elsewhere is written again",
        "        kept.data = kept.clone()\n",
        "",
        "cases_graphs",
    ),
    Mutant(
        "unit/grads",
        "`give` drops what autograd has put on the sharded parameter",
        "        if param.grad is not None:\n            self.in_main.add_(param.grad)\n",
        "",
        "cases_graphs::test_penalties_on_the_parameters_accumulate_with_everything_else",
    ),
    Mutant(
        "unit/grads",
        "a gradient that was kept and got nothing new is dropped",
        "(grad.is_kept or is_new)",
        "is_new",
        "cases_training",
    ),
    Mutant(
        "unit/shard",
        "main weights finer than what was computed with are rounded",
        "torch.where(mask[own] & ~kept,",
        "torch.where(mask[own],",
        "edits::test_changes_on_another_replica_round_nothing_here",
    ),
    # -- unit
    Mutant(
        "unit/unit",
        "no unit trains",
        "        self.is_trainable = trainable\n",
        "",
        "cases_freezing",
    ),
    Mutant(
        "unit/unit",
        "a frozen unit counts as one that trains",
        "        self.is_trainable = trainable\n",
        "        self.is_trainable = self.is_trainable or trainable\n",
        "invariants::test_what_is_frozen_later_is_not_reduced cases_freezing cases_graphs",
    ),
    Mutant(
        "unit/unit",
        "a gather does not wait for the slot's last use",
        "        slot.released.wait()  # rule 2\n",
        "",
        "matrix",
    ),
    Mutant(
        "unit/unit",
        "`start_gather` without `arrived.complete()`",
        "        slot.arrived.complete()  #",
        "        #",
        "invariants::test_no_gather_is_under_way_where_weights_are_cast_or_gathered_again matrix cases_execution",
    ),
    Mutant(
        "unit/unit",
        "a copy out of the slot without a record",
        "            copy = weight.clone()\n        self.weight_slot.released.record()\n",
        "            copy = weight.clone()\n",
        "invariants::test_weights_read_elsewhere_are_free_of_races away",
    ),
    Mutant(
        "unit/grads",
        "gradients of before are taken at each opening",
        "        is_first, self._has_taken = not self._has_taken, True\n",
        "        is_first, self._has_taken = True, True\n",
        "cases_passes matrix",
    ),
    Mutant(
        "unit/buffers",
        "a grad slot is opened without waiting",
        "        self._writers.clear()\n        self.drained.wait()\n",
        "        self._writers.clear()\n",
        "matrix",
    ),
    Mutant(
        "unit/grads",
        "a grad slot is opened as if it held main grads",
        "        is_added_to = self.adds and self.is_main_in_slot\n        self.set_written(is_added_to)\n",
        "        is_added_to = self.adds and self.is_main_in_slot\n        self.set_written(self.adds)\n",
        "cases_training",
    ),
    Mutant(
        "unit/grads",
        "main grads in the slot are not added to",
        "        is_added_to = self.adds and self.is_main_in_slot\n        self.set_written(is_added_to)\n",
        "        is_added_to = self.adds and self.is_main_in_slot\n        self.set_written(False)\n",
        "dial",
    ),
    Mutant(
        "unit/grads",
        "main grads in the slot count once, not N times",
        "            chunk.mul_(world_size) if rank",
        "            chunk.mul_(1) if rank",
        "dial",
    ),
    Mutant(
        "unit/grads",
        "parked gradients are dropped",
        "                self.write(param_index, parked)\n",
        "",
        "coalesce",
    ),
    Mutant(
        "unit/grads",
        "parked gradients are added again",
        "                parked, grad.parked = grad.parked, None\n",
        "                parked = grad.parked\n",
        "coalesce",
    ),
    Mutant(
        "unit/grads",
        "a used parameter is not noted",
        "        grad.is_used = self.has_unreduced = True\n",
        "        self.has_unreduced = True\n",
        "cases_training",
    ),
    Mutant(
        "unit/grads",
        "what came late is not noted",
        "        grad.is_used = self.has_unreduced = True\n",
        "        grad.is_used = True\n",
        "cases_passes cases_execution",
    ),
    Mutant(
        "unit/grads",
        "a reduction leaves `has_unreduced`",
        "        self.reductions += 1\n        self.has_unreduced = False\n",
        "        self.reductions += 1\n",
        "invariants::test_a_unit_is_averaged_over_replicas_once",
    ),
    Mutant(
        "unit/grads",
        "a parameter without a gradient contributes leftovers",
        "                    grad.in_slot.zero_()\n            if slot is None:\n",
        "                    pass\n            if slot is None:\n",
        "cases_execution",
    ),
    Mutant(
        "unit/grads",
        "the range of a frozen parameter that holds a gradient is not zeroed",
        "            if (self.counts(grad) or grad.is_kept) and not grad.is_written:",
        "            if self.counts(grad) and not grad.is_written:",
        "invariants::test_a_gradient_frozen_between_micro_batches_stays_as_it_is cases_freezing cases_graphs",
    ),
    Mutant(
        "unit/buffers",
        "a reduction does not wait for gradients",
        "            self.written.wait()\n",
        "",
        "matrix",
    ),
    Mutant(
        "unit/buffers",
        "a second stream writes gradients without waiting",
        "            self.drained.wait()  # rule 3\n            self._writers",
        "            self._writers",
        "simulated_device::test_gradients_that_come_on_other_streams_are_waited_for",
    ),
    Mutant(
        "unit/buffers",
        "a reduction waits for gradients of one stream",
        "        for stream in self._writers or (None,):\n",
        "        for stream in self._writers[:1] or (None,):\n",
        "simulated_device::test_gradients_that_come_on_other_streams_are_waited_for",
    ),
    Mutant(
        "comm/nccl",
        "fp16 sums are not divided beforehand",
        "                if before > 1:\n                    slot.mul_(1.0 / before)\n",
        "",
        "transport::test_means_are_of_the_sum",
    ),
    Mutant(
        "unit/grads",
        "`adds` is not set after a first reduction",
        "        accumulate, self.adds = self.adds and not self.is_main_in_slot, True\n",
        "        accumulate = self.adds and not self.is_main_in_slot\n",
        "cases_passes::test_recomputed_layers_with_several_forwards_and_backwards",
    ),
    Mutant(
        "unit/grads",
        "main grads in the slot are added twice",
        "        accumulate, self.adds = self.adds and not self.is_main_in_slot, True\n",
        "        accumulate, self.adds = self.adds, True\n",
        "dial",
    ),
    Mutant(
        "unit/grads",
        "a grad slot that is drained keeps its content",
        "        slot.content = None\n        slot.drained.record(work)\n",
        "        slot.drained.record(work)\n",
        "cases_training cases_execution cases_passes",
    ),
    Mutant(
        "unit/grads",
        "scratch does not know who uses it",
        "        slot.scratch.drained = slot.drained\n",
        "",
        "dial::test_over_sockets_too",
    ),
    Mutant(
        "comm/gloo",
        "messages under way are freed with whoever let go of them",
        "            _abandoned.setdefault(self._group, []).extend(self._messages)\n",
        "",
        "transport::test_messages_that_nobody_waits_for_stop_no_others",
    ),
    Mutant(
        "comm/nccl",
        "16-bit chunks are summed by the backend",
        "            if mode is ReductionMode.EXCHANGE_16:\n",
        "            if False:\n",
        "transport::test_every_transport_has_every_reduction",
    ),
    Mutant(
        "comm/nccl",
        "what is there to add to is overwritten",
        "            elif mode is ReductionMode.FP32 and not accumulate:\n",
        "            elif mode is ReductionMode.FP32:\n",
        "transport::test_every_transport_has_every_reduction",
    ),
    Mutant(
        "engine/engine",
        "nobody hears of a layer's forward",
        "            observer.on_moment(Moment.FORWARD_BEGINS, unit.index)\n",
        "            pass\n",
        "trace::test_every_unit_has_its_forward_and_its_backward",
    ),
    Mutant(
        "engine/engine",
        "nobody hears of gradients",
        "            observer.on_moment(Moment.GRAD_WRITTEN, unit.index)\n",
        "            pass\n",
        "trace::test_every_unit_has_its_forward_and_its_backward",
    ),
    Mutant(
        "unit/grads",
        "main grads are not zeroed where gradients wait for the first time",
        "                segment.main.zero_()\n                segment.adds = True\n",
        "                segment.adds = True\n",
        "invariants::test_gradients_that_wait_are_not_added_to_those_of_a_step_before",
    ),
    Mutant(
        "unit/grads",
        "`leave_unreduced` overwrites what autograd has put there",
        "                    segment.add_own(grad, param.grad)\n",
        "                    pass\n",
        "cases_graphs::test_penalties_on_the_parameters_accumulate_with_everything_else",
    ),
    Mutant(
        "unit/grads",
        "`leave_unreduced` leaves out what only waits",
        "            if grad.is_used or grad.is_kept:\n",
        "            if grad.is_used:\n",
        "invariants::test_a_reduced_gradient_can_be_cleared_while_others_of_its_layer_wait",
    ),
    Mutant(
        "unit/grads",
        "`resume` keeps what was cleared as used",
        "                    grad.is_used = grad.is_kept = False\n                    if own",
        "                    if own",
        "invariants::test_what_was_cleared_and_is_not_used_again_has_no_gradient dial cases_graphs",
    ),
    Mutant(
        "unit/grads",
        "`resume` keeps what was cleared",
        "                    grad.forget()\n",
        "",
        "dial",
    ),
    Mutant(
        "unit/grads",
        "`resume` drops what replaced a stand-in",
        "                    if own is not None:\n                        segment.add_own(grad, own)\n\n",
        "\n",
        "cases_graphs invariants::test_a_gradient_put_in_place_of_one_that_waits_is_added_to",
    ),
    Mutant(
        "unit/grads",
        "`forget` leaves the slot",
        "        self.in_slot.zero_()\n        self.in_main.zero_()\n",
        "        self.in_main.zero_()\n",
        "dial cases_graphs",
    ),
    Mutant(
        "unit/grads",
        "`forget` leaves the main grads",
        "        self.in_slot.zero_()\n        self.in_main.zero_()\n",
        "        self.in_slot.zero_()\n",
        "invariants::test_clearing_forgets_what_was_reduced_and_what_waits dial cases_graphs",
    ),
    Mutant(
        "unit/grads",
        "what autograd gives to a sharded parameter counts once, not N times",
        "add_(own, alpha=self._plan.layout.world_size)",
        "add_(own)",
        "cases_graphs",
    ),
    Mutant(
        "unit/grads",
        "the reductions of a backward are not counted anew",
        "        self.reductions = 0\n        self.has_unreduced = False\n        given",
        "        self.has_unreduced = False\n        given",
        "invariants::test_an_interrupt_while_a_failed_backward_is_left_leaves_nothing",
    ),
    Mutant(
        "unit/grads",
        "a backward leaves `has_unreduced`",
        "        self.reductions = 0\n        self.has_unreduced = False\n        given",
        "        self.reductions = 0\n        given",
        "invariants::test_an_interrupt_while_a_failed_backward_is_left_leaves_nothing",
    ),
    Mutant(
        "unit/grads",
        "a backward leaves `used`",
        "            grad.is_used = False\n        self",
        "        self",
        "cases_execution cases_training",
    ),
    Mutant(
        "unit/grads",
        "a backward leaves `_has_taken`",
        "        self._has_taken = self.waits = False\n        return given\n",
        "        self.waits = False\n        return given\n",
        "cases_training",
    ),
    Mutant(
        "unit/buffers",
        "a reduction does not wait for what is collected",
        "        self.flush()\n        for stream",
        "        for stream",
        "grad_slot",
    ),
    Mutant(
        "unit/buffers",
        "a part is added before what was there",
        "            self.flush()\n            place.add_",
        "            place.add_",
        "grad_slot",
    ),
    Mutant(
        "unit/buffers",
        "gradients of several streams are collected together",
        " or stream != self._collected_on:",
        ":",
        "grad_slot",
    ),
    Mutant(
        "unit/buffers",
        "what is collected has no bound",
        "if self._collected_bytes + n_bytes > _COLLECTED_BYTES or",
        "if",
        "grad_slot",
    ),
    Mutant(
        "unit/buffers",
        "what was collected is copied where the caller is",
        "with self._streams.module.stream(self._collected_on):",
        "if True:",
        "grad_slot",
    ),
    Mutant(
        "unit/buffers",
        "what a failed backward has collected is copied into the next unit's slot",
        "        self._forget_collected()\n        self._writers",
        "        self._writers",
        "grad_slot",
    ),
    Mutant(
        "unit/grads",
        "what is collected is not parked",
        "        self.slot.flush()\n        self.slot.content",
        "        self.slot.content",
        "simulated_device::test_gradients_that_are_parked_are_all_there",
    ),
    Mutant(
        "unit/grads",
        "what is collected is not left in the slot",
        "        if self.slot is not None:\n            self.slot.flush()\n",
        "",
        "simulated_device::test_gradients_that_are_left_in_a_slot_can_be_forgotten",
    ),
    # -- reductions, replicas, used
    Mutant(
        "engine/reductions",
        "an average is not awaited before a gradient is taken",
        "            self.replicas.finish_average(unit)\n        unit.grads.write",
        "            pass\n        unit.grads.write",
        "invariants::test_gradients_in_parts_do_not_meet_their_average",
    ),
    Mutant(
        "engine/reductions",
        "an average is not awaited before a slot is opened",
        "            self.replicas.finish_average(unit)\n        with self",
        "            pass\n        with self",
        "replicas",
    ),
    Mutant(
        "engine/reductions",
        "what is due is reduced at once",
        "            if earlier.index in self.due:  #",
        "            if False:  #",
        "coalesce",
    ),
    Mutant(
        "engine/reductions",
        "what is not due is parked",
        "            if earlier.index in self.due:  #",
        "            if True:  #",
        "invariants::test_gradients_that_come_late_are_reduced_where_another_unit_needs_their_slot",
    ),
    Mutant(
        "engine/reductions",
        "frozen units are reduced",
        "        if not (unit.is_trainable or unit.grads.waits):\n            return\n",
        "",
        "cases_freezing",
    ),
    Mutant(
        "engine/reductions",
        "a unit without gradients reduces another's",
        "                return\n            self._open(unit)\n        with",
        "                return\n        with",
        "cases_execution",
    ),
    Mutant(
        "engine/reductions",
        "a reduction is not remembered",
        "            self._under_way.append(work)\n",
        "            pass\n",
        "cases_training::test_gradients_accumulate_over_micro_batches",
    ),
    Mutant(
        "engine/reductions",
        "the optimizer does not wait",
        "            self._done.wait()  # rule 7",
        "            pass  # rule 7",
        "matrix",
    ),
    Mutant(
        "engine/used",
        "flags of used parameters are not awaited",
        "            self._arrived[0].wait()\n            for stage",
        "            for stage",
        "invariants::test_a_layer_that_no_rank_has_run_has_no_gradient_however_late_flags_are matrix cases_execution",
    ),
    Mutant(
        "engine/used",
        "flags of replicas are not awaited",
        "                self._start(stage)\n                self._arrived[stage].wait()\n",
        "                self._start(stage)\n",
        "replicas",
    ),
    Mutant(
        "engine/used",
        "flags are sent before they are written",
        "        self._written[stage].wait()  # rule 5",
        "        pass  # rule 5",
        "matrix",
    ),
    Mutant(
        "engine/used",
        "flags that have changed are not written",
        "                self._flags[0].copy_(told, non_blocking=is_remote)\n",
        "",
        "cases_execution",
    ),
    Mutant(
        "engine/replicas",
        "an average without rule 4",
        "                self._written.record()\n                self._written.wait()  # rule 4\n            else",
        "                pass\n            else",
        "invariants::test_replicas_of_whole_models_are_free_of_races replicas",
    ),
    Mutant(
        "engine/replicas",
        "an average does not wait for its reduction",
        "                self._reduced.wait()  # rule 7",
        "                pass  # rule 7",
        "replicas",
    ),
    Mutant(
        "engine/replicas",
        "the last unit is not averaged",
        "        self.flush()\n        under_way, self",
        "        under_way, self",
        "replicas",
    ),
    Mutant(
        "engine/replicas",
        "more gradients do not wait for an average under way",
        "                self._under_way.pop(unit.index).wait()  # rule 7",
        "                self._under_way.pop(unit.index)",
        "replicas",
    ),
    Mutant(
        "engine/replicas",
        "where a reduction ends is not recorded",
        "            self._reduced.record(reduction)",
        "            pass",
        "replicas",
    ),
    Mutant(
        "engine/replicas",
        "the optimizer does not wait for averages",
        "        for averaged in under_way.values():\n            averaged.wait()  # rule 7",
        "        for _ in under_way.values():\n            pass  # rule 7",
        "replicas",
    ),
    Mutant(
        "engine/replicas",
        "an average starts with the next unit's reduction on accelerators too",
        "        if reduction is None:\n            self.flush()\n",
        "",
        "simulated_device::test_an_average_starts_at_once",
    ),
    Mutant(
        "build",
        "averages run on the comm stream",
        "streams, StreamName.REPLICA, who",
        "streams, StreamName.COMM, who",
        "simulated_device::test_no_gather_is_behind_an_average replicas",
    ),
    Mutant(
        "comm/connect",
        "ranks meet in their first collective",
        "            ranks.transport.meet()",
        "            pass",
        "simulated_device::test_all_groups_are_connected_from_the_start",
    ),
    Mutant(
        "inspect/races",
        "what one stream knows is forgotten for all",
        "                if earlier.time <= known:",
        "                if earlier.time <= clock[other]:",
        "races::test_what_one_stream_knows_another_need_not",
    ),
    # -- kept views
    Mutant(
        "engine/kept_views",
        "nobody asks who has a slot's memory",
        "    if slot.references <= usual:\n",
        "    if True:\n",
        "kept_views",
    ),
    Mutant(
        "engine/kept_views",
        "what was frozen is not looked through",
        "    gc.unfreeze()  # the collector does not look through what was frozen\n",
        "",
        "kept_views",
    ),
    Mutant(
        "engine/kept_views",
        "compute views of other layers are taken for views",
        " and id(each) not in own]",
        "]",
        "kept_views",
    ),
    Mutant(
        "engine/kept_views",
        "what is known to be harmless is searched for again",
        "    slot.harmless_references += max(slot.references - usual, 0)\n",
        "",
        "kept_views",
    ),
    Mutant(
        "engine/kept_views",
        "what a forward finds is usual",
        "    slot.usual_references = min(slot.usual_references, slot.references)\n",
        "    slot.usual_references = slot.references\n",
        "kept_views",
    ),
    Mutant(
        "engine/hooks",
        "saved weights keep the memory of their slot",
        "    return weights, tensor.size(), tensor.stride(), offset\n",
        "    return tensor.detach()\n",
        "kept_views",
    ),
    # -- edits
    Mutant(
        "engine/edits",
        "edits of a pass that was given up are left",
        "        self._changed.clear()\n",
        "",
        "invariants::test_what_an_interrupted_forward_has_written_is_not_there_in_the_next",
    ),
    Mutant(
        "engine/edits",
        "the first passes do not look at contents",
        "        return unit.has_edits or self.is_learning or unit.index in self._known\n",
        "        return unit.has_edits or unit.index in self._known\n",
        "edits",
    ),
    Mutant(
        "engine/edits",
        "later passes look at what has a new version only",
        "        return unit.has_edits or self.is_learning or unit.index in self._known\n",
        "        return unit.has_edits or self.is_learning\n",
        "edits",
    ),
    Mutant(
        "engine/edits",
        "what is known to change is kept only with a new version",
        "            self._changed[unit.index] = [segment.weights.clone() for segment in unit.segments]\n",
        "            if unit.has_edits or self.is_learning:\n"
        "                self._changed[unit.index] = [segment.weights.clone() for segment in unit.segments]\n",
        "edits",
    ),
    Mutant(
        "engine/edits",
        "what was kept is the slot itself",
        "= [segment.weights.clone() for",
        "= [segment.weights for",
        "edits",
    ),
    Mutant(
        "engine/edits",
        "the first pass without gradients is not learnt from",
        "        self.is_learning = torch.is_grad_enabled() not in self._learnt\n",
        "        self.is_learning = not self._learnt\n",
        "invariants::test_what_evaluation_alone_writes_is_learnt_in_its_first_pass edits",
    ),
    Mutant(
        "engine/edits",
        "every pass is learnt from",
        "            self._learnt.add(torch.is_grad_enabled())\n",
        "            pass\n",
        "edits dial cases_training",
    ),
    Mutant(
        "engine/edits",
        "only this rank's changes are known",
        "                self._known.update(*(changed for _, changed in told))\n",
        "                self._known.update(self._changed)\n",
        "edits",
    ),
    Mutant(
        "engine/edits",
        "two values for one element are not noticed",
        "            values[1] = torch.where(mask, -mine.float(), values[1])\n",
        "            values[1] = torch.where(mask, -mine.float(), values[1])\n            values[1] = -values[0]\n",
        "edits",
    ),
    Mutant(
        "engine/edits",
        "views that were given other memory are accepted",
        "        if (moved := unit.put_back_views()) is not None:\n",
        "        if (moved := unit.put_back_views()) is None and moved:\n",
        "edits",
    ),
    Mutant(
        "engine/attach",
        "recurrent layers put their weights into memory of their own",
        '        module.__dict__["flatten_parameters"] = _do_nothing\n',
        "        pass\n",
        "cases_recurrent",
    ),
    # -- weights that are away, hooks
    Mutant(
        "unit/unit",
        "a compute view that is kept is what lies in its slot",
        "            for view in self._views:\n                view.__class__ = away_class\n",
        "",
        "kept_weights",
    ),
    Mutant(
        "unit/unit",
        "a compute view is away while its layer runs",
        "            for view in self._views:\n                view.__class__ = nn.Parameter\n",
        "",
        "kept_weights::test_what_a_layers_own_graph_keeps_is_in_place_in_its_backward",
    ),
    Mutant(
        "unit/unit",
        "whether a view that is away trains is what it is told",
        "        with DisableTorchFunctionSubclass():  # the views themselves, whatever their class\n",
        "        if True:\n",
        "cases_freezing",
    ),
    Mutant(
        "engine/hooks",
        "a view of a weight that had this slot before is computed with",
        "            if (base := tensor._base) is not None and id(base) not in own:\n",
        "            if (base := tensor._base) is None and base:\n",
        "kept_weights::test_a_view_of_a_weight_that_is_passed_on_raises",
    ),
    Mutant(
        "engine/hooks",
        "a view of a weight that had another slot is computed with",
        "            _refuse_stale(engine, other, tensor._base)\n",
        "            pass\n",
        "kept_weights::test_a_view_of_a_weight_that_is_passed_on_raises",
    ),
    Mutant(
        "engine/hooks",
        "a weight that is away and saved as it is counts as an activation",
        "            if (owner := owner_of(engine, tensor)) is not None:  #",
        "            if (owner := owner_of(engine, None)) is not None:  #",
        "kept_weights::test_whatever_is_computed_with_it",
    ),
    Mutant(
        "engine/away",
        "a gradient that a Function gives to a weight is dropped",
        "        take_grad(unit, weight.param_index, grad)\n",
        "        pass\n",
        "away::test_a_function_of_the_users_gives_gradients_to_the_weights_that_it_is_given",
    ),
    Mutant(
        "engine/away",
        "the running layer's weight is not saved from a borrowed one",
        "            weights[tensor] = tensor.clone()  #",
        "            weights[tensor] = tensor  #",
        "away",
    ),
    Mutant(
        "engine/away",
        "a view of a borrowed weight stays in the slot",
        "map_tensors(result, lambda tensor: tensor.clone() if slot.holds(tensor) else tensor)",
        "result",
        "away",
    ),
    Mutant(
        "engine/hooks",
        "another unit's weight is saved as an activation",
        "        if lowest <= address < highest and (other := unit_at(engine, address)) is not None:\n",
        "        if address < 0 and (other := unit_at(engine, address)) is not None:\n",
        "kept_weights away",
    ),
    Mutant(
        "engine/hooks",
        "a borrowed weight is unpacked in place",
        "            return mark.unit.copy_out(saved) if mark.is_borrowed else saved\n",
        "            return saved\n",
        "invariants::test_weights_read_elsewhere_are_free_of_races",
    ),
    Mutant(
        "engine/hooks",
        "an activation keeps its graph",
        "        return tensor if tensor.is_leaf else tensor.detach(), tensor._version\n",
        "        return tensor, tensor._version\n",
        "cases_graphs",
    ),
    Mutant(
        "engine/hooks",
        "versions of activations are not compared",
        "        if saved._version != mark:\n",
        "        if False:\n",
        "cases_values::test_an_activation_that_is_modified_and_was_saved_raises",
    ),
    Mutant(
        "engine/hooks",
        "the node behind a view is not watched",
        "            watch(tensor._base.grad_fn)\n",
        "            pass\n",
        "cases_values::test_a_view_that_is_modified_announces_its_layer_all_the_same",
    ),
    Mutant(
        "engine/hooks",
        "a layer's outputs are not watched",
        "        untraced(_watch_outputs, output, args, _Need(engine, use).watch)\n",
        "        pass\n",
        "cases_passes cases_graphs",
    ),
    Mutant(
        "engine/hooks",
        "the root's outputs are not watched",
        "        untraced(_watch_outputs, output, (), BeginBackward(engine, pass_).watch)\n",
        "        pass\n",
        "cases_execution cases_graphs",
    ),
    # -- program
    Mutant(
        "plan/program",
        "a slot is free one visit early",
        "        slot_free_at.append(latest_in_slot.get(slot_of[unit], -1) + 1)\n",
        "        slot_free_at.append(max(latest_in_slot.get(slot_of[unit], -1), 0))\n",
        "program",
    ),
    Mutant(
        "plan/program",
        "a unit is reduced after each visit",
        "        if reduce and k > 0 and last_visit[visits[k - 1]] == k - 1:\n",
        "        if reduce and k > 0:\n",
        "program",
    ),
    Mutant(
        "plan/program",
        "the step of the visit that is asked for is not issued",
        "        while self._issued_steps <= self.released:\n",
        "        while self._issued_steps < self.released:\n",
        "program",
    ),
    Mutant(
        "plan/program",
        "the end of a schedule leaves its last step out",
        "        return self.release_before(len(self.visits))\n",
        "        return self.release_before(len(self.visits) - 1)\n",
        "program",
    ),
    Mutant(
        "plan/program",
        "what is used beside the program is not in the log",
        "        self._is_outside = True\n        self.log.append(unit)\n",
        "        self._is_outside = True\n",
        "program",
    ),
    Mutant(
        "engine/engine",
        "what a layer has written before it calls another is lost",
        "                self._take_edits(self.units[holder])\n            self.units[holder].release()\n",
        "                pass\n            self.units[holder].release()\n",
        "edits::test_what_a_layer_writes_before_it_calls_another_stays",
    ),
    Mutant(
        "engine/hooks",
        "a weight that is given to another layer stays a view of its slot",
        "    if engine.is_in_layer:\n",
        "    if False:\n",
        "away::test_a_weight_that_a_layer_gives_to_another_is_its_own",
    ),
    Mutant(
        "unit/grads",
        "gradients of a layer that is frozen while they wait are not reduced",
        "        self.waits = self.waits or has_trained\n",
        "",
        "dial::test_gradients_of_layers_that_are_frozen_while_they_wait_stay",
    ),
    Mutant(
        "unit/grads",
        "what has waited waits for ever",
        "        self._has_taken = self.waits = False\n        return given\n",
        "        self._has_taken = False\n        return given\n",
        "invariants::test_what_has_waited_once_is_not_reduced_for_ever",
    ),
    Mutant(
        "engine/used",
        "a rank that had no part in a gradient that waits does not hear of it",
        "not unit.grads.counts(grad)",
        "not grad.view.requires_grad",
        "dial::test_gradients_of_layers_that_are_frozen_while_they_wait_stay",
    ),
    Mutant(
        "engine/away",
        "weights that take turns are taken to stay",
        "        return self.away(param_index) if self.unit.takes_turns else self.in_place(param_index)\n",
        "        return self.in_place(param_index)\n",
        "away::test_the_root_may_read_weights_of_layers",
    ),
    Mutant(
        "engine/grad_inputs",
        "gradients that are asked for are added to what `.grad` holds",
        "        each.param.grad = None\n",
        "        pass\n",
        "grad_inputs",
    ),
    Mutant(
        "engine/grad_inputs",
        "what `.grad` held does not come back",
        "            each.param.grad = grad\n",
        "            pass\n",
        "grad_inputs",
    ),
    Mutant(
        "engine/grad_inputs",
        "hooks of parameters hear of gradients that are asked for",
        "            engine.delivers = False\n",
        "            pass\n",
        "grad_inputs",
    ),
    Mutant(
        "engine/grad_inputs",
        "what trains is not asked before gradients are",
        "            unit.take_trainability()  # views",
        "            pass  # views",
        "grad_inputs",
    ),
    # -- uneven inputs
    Mutant(
        "join",
        "what ranks did after a backward is not compared when the next pass is announced",
        "            if self._roles and _Role.HAS_RUN_OUT in roles:\n                self._compare()\n",
        "",
        "join::test_what_is_repeated_is_compared join::test_what_a_clipping_is_given_is_compared",
    ),
    Mutant(
        "join",
        "what ranks did after the last backward is not compared",
        "        self._meet()\n        if _Role.HAS_RUN_OUT in self._roles:\n            self._compare()\n",
        "        self._meet()\n",
        "join::test_what_is_repeated_is_compared",
    ),
    Mutant(
        "join",
        "what followed an earlier pass is compared again",
        "            self._acts.clear()\n",
        "            pass\n",
        "join",
    ),
    Mutant(
        "join",
        "gradients of the step before are not cleared on a rank that has run out",
        "        self._has_run_out = True\n        self._clear()\n",
        "        self._has_run_out = True\n",
        "join",
    ),
    Mutant(
        "join",
        "gradients of the last step are not cleared on a rank that had run out",
        "        if self._has_run_out:\n            self._clear()\n",
        "",
        "join",
    ),
    Mutant(
        "join",
        "gradients of micro-batches are cleared where inputs end between them",
        "            self._is_complete = announced.is_synced\n",
        "            self._is_complete = True\n",
        "join",
    ),
    Mutant(
        "join",
        "nobody notices that a norm was taken for a sum of Join's",
        "                if marks.item() != _MARK * ranks.total_size:\n",
        "                if False:\n",
        "join::test_a_norm_that_only_some_take_ends_all_of_them",
    ),
    Mutant(
        "join",
        "a context that is switched off announces passes",
        "if self._shadows or not config.enable:",
        "if self._shadows:",
        "join::test_a_context_that_is_switched_off_is_none",
    ),
    Mutant(
        "join",
        "an exception leaves the context in force",
        "        weakref.finalize(self, inputs.leave)\n",
        "        pass\n",
        "join",
    ),
    Mutant(
        "join",
        "weights are not cast when others cast theirs",
        "announced._replace(casts=any(row.casts for row in rows))",
        "announced._replace(casts=False)",
        "join",
    ),
    # -- pieces of whole blocks and rows
    Mutant(
        "plan/layout",
        "a parameter that is cut starts where the one before it ends",
        "                offset += before_cut % grain\n",
        "                pass\n",
        "layout aligned_pieces::test_blockwise_moments_are_those_of_the_unsharded_model",
    ),
    Mutant(
        "plan/layout",
        "a shard that is cut into often is not a multiple of the grain",
        "        common = math.lcm(multiple, *cut_often)\n",
        "        common = multiple\n",
        "layout aligned_pieces::test_blockwise_moments_are_those_of_the_unsharded_model",
    ),
    Mutant(
        "unit/sharding",
        "a transposed gradient has rows",
        "        return self._replace(whole=_whole(whole.shape) if whole.is_contiguous() else whole, has_rows=False)\n",
        "        return self._replace(whole=_whole(whole.shape) if whole.is_contiguous() else whole)\n",
        "aligned_pieces::test_a_square_of_rows_has_none_when_it_is_turned",
    ),
    Mutant(
        "unit/sharded_tensor",
        "columns are taken for rows",
        "type(each) is int and each % piece.ndim for each in dims)",
        "type(each) is int for each in dims)",
        "aligned_pieces::test_only_what_stays_within_rows_is_answered",
    ),
    # -- what optimizers see while they step
    Mutant(
        "unit/step_grads",
        "empty pieces have gradients in a step",
        "            param.grad = None\n",
        "            pass\n",
        "step_grads::test_kernels_over_lists_of_tensors_meet_no_empty_ones",
    ),
    Mutant(
        "unit/optimizer_hooks",
        "gradients made by a closure are not set aside",
        "            begin(params)\n",
        "            pass\n",
        "step_grads::test_a_closure_sees_and_makes_all_gradients",
    ),
    Mutant(
        "unit/optimizer_hooks",
        "gradients that wait refuse a step whose closure reduces them",
        "    if closure is None:\n        _check_grads(params)\n",
        "    _check_grads(params)\n",
        "pieces::test_a_closure_reduces_what_waits",
    ),
    Mutant(
        "unit/optimizer_hooks",
        "an optimizer of the user's own sees pieces",
        "    begin = set_aside if _is_elementwise(optimizer) else count_as_written\n",
        "    begin = set_aside\n",
        "optimizers::test_an_optimizer_of_ones_own_sees_whole_parameters",
    ),
    Mutant(
        "unit/optimizer_hooks",
        "a step of the user's own is taken for that of the class it derives from",
        '    modules = (kind.__module__, getattr(kind.step, "__module__", ""))\n',
        "    modules = tuple(each.__module__ for each in kind.__mro__)\n",
        "optimizers::test_an_optimizer_of_ones_own_sees_whole_parameters",
    ),
    Mutant(
        "unit/optimizer_hooks",
        "what an optimizer of the user's own has loaded does not know what it is",
        "                ShardedTensor.wrap(value, Sharding.of_piece(piece, is_weight=False))\n",
        "                pass\n",
        "optimizers::test_state_of_an_optimizer_of_ones_own_is_collected_and_knows_what_it_is",
    ),
    Mutant(
        "unit/step_grads",
        "behind a step gradients do not know that they are pieces",
        "        _plain.pop().__class__ = ShardedTensor\n",
        "        _plain.pop()\n",
        "step_grads::test_what_knows_plain_tensors_only_is_given_plain_gradients",
    ),
    Mutant(
        "unit/sharded_tensor",
        "where a rank has no rows the numbers of rows are what they are put together with",
        "    return piece.numel() if piece.sharding.whole is None else piece.sharding.whole.numel()\n",
        "    return piece.numel()\n",
        "aligned_pieces::test_statistics_of_rows_are_those_of_the_unsharded_model",
    ),
    Mutant(
        "unit/optimizer_hooks",
        "hooks registered later see gradients that were set aside",
        "        before.move_to_end(self.before.id)\n",
        "",
        "step_grads::test_hooks_around_a_step_see_all_gradients",
    ),
    Mutant(
        "unit/optimizer_hooks",
        "what a step that failed has set aside is not put back",
        "    end_step(params)  # one that has failed\n",
        "",
        "step_grads::test_a_step_that_failed_can_be_made_again",
    ),
    Mutant(
        "checkpoint/optimizer_state",
        "state of parameters is what the first rank has of them",
        "if number is None or shard.layout.numel and not shard.local.numel:",
        "if number is None:",
        "step_grads::test_nothing_is_kept_for_empty_pieces",
    ),
    Mutant(
        "engine/engine",
        "a forward does not ask whether weights are empty",
        '        self.refuse_empty("a forward")\n',
        "",
        "empty::test_whatever_wants_values_names_what_has_none",
    ),
    Mutant(
        "engine/empty",
        "optimizers step on what is empty",
        "        if any(id(seen.tensor) in params for seen in empty._params.values()):\n",
        "        if False:\n",
        "empty::test_whatever_wants_values_names_what_has_none",
    ),
    Mutant(
        "engine/empty",
        "a buffer that was replaced is taken to be empty",
        "            is_same = buffer is seen.tensor and (",
        "            is_same = buffer is not None and (",
        "empty::test_buffers_have_to_be_filled_too",
    ),
    Mutant(
        "unit/shard",
        "hooks of parameters on meta are lost",
        '    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):\n',
        "    for hooks in ():\n",
        "empty::test_room_is_made_under_the_very_parameters_of_a_model_on_meta",
    ),
    Mutant(
        "unit/shard",
        "parameters from meta share the main weights' version",
        "nn.Parameter(piece.data, requires_grad",
        "nn.Parameter(piece, requires_grad",
        "empty::test_it_is_filled_by_whatever_writes_to_it",
    ),
    Mutant(
        "build",
        "values of ranks other than 0 are dropped where rank 0 has none",
        "    lost = next((name for name in firsts if name not in set(on_meta)), None)\n",
        "    lost = None\n",
        "empty::test_values_that_would_be_lost_are_refused",
    ),
    Mutant(
        "build",
        "buffers that rank 0 has sent are empty all the same",
        "if name in empty or (name in checked.on_meta and name not in sent)",
        "if name in empty or name in checked.on_meta",
        "empty::test_rank_0_has_values_for_ranks_that_have_none",
    ),
    Mutant(
        "plan/structure",
        "memory on meta is not looked at",
        "    return int(tensor.untyped_storage()._cdata) if is_meta(tensor) else 0\n",
        "    return id(tensor) if is_meta(tensor) else 0\n",
        "empty::test_weights_on_meta_that_share_memory_are_refused_as_others_are",
    ),
    Mutant(
        "whole_weight",
        "what somebody holds is closed",
        "_is_held(memory := self._open[name])",
        "(memory := self._open[name]) is None",
        "whole_weight::test_what_somebody_holds_stays_open",
    ),
    Mutant(
        "whole_weight",
        "weights of one operation close each other",
        "            if name not in kept and not",
        "            if not",
        "whole_weight::test_an_operation_on_several_weights_has_all_of_them",
    ),
    Mutant(
        "whole_weight",
        "nothing is closed before the end",
        "            if nbytes + _total(self._open) <= self._limit:\n",
        "            if True:\n",
        "whole_weight::test_no_more_is_open_than_a_unit",
    ),
    Mutant(
        "whole_weight",
        "memory of closed weights goes back at once",
        "self._spare.pop((shape, shard.dtype), None)",
        "None",
        "whole_weight::test_no_more_is_open_than_a_unit",
    ),
    Mutant(
        "whole_weight",
        "what is written to weights that have values stays",
        "        if name not in self._names:\n            return\n",
        "",
        "initialise::test_tables_of_other_models_are_computed_by_their_reset_parameters",
    ),
    Mutant(
        "whole_weight",
        "elements without a value are kept",
        "            if bool(flat.isnan().all()):\n",
        "            if True:\n",
        "initialise::test_what_an_initialisation_cannot_do_is_named",
    ),
    Mutant(
        "initialise",
        "buffers that were loaded are what the initialisation leaves",
        "            if not torch.equal(buffer, value):\n",
        "            if False:\n",
        "initialise::test_tables_of_other_models_are_computed_by_their_reset_parameters",
    ),
    Mutant(
        "initialise",
        "the generator goes on from the seed",
        "    with torch.random.fork_rng(devices,",
        "    with torch.random.fork_rng(devices, enabled=False,",
        "initialise::test_a_function_sees_whole_weights_in_every_module",
    ),
    Mutant(
        "initialise",
        "modules that say that they are initialised are believed",
        "        each.__dict__.pop(huggingface.INITIALISED, None)\n",
        "        pass\n",
        "initialise::test_init_empty_weights_is_as_good_as_the_meta_device",
    ),
    Mutant(
        "initialise",
        "what failed on another rank stays",
        "        engine.empty.renew([shard for shard in engine.param_shards if shard.name in params], found)\n",
        "        pass\n",
        "initialise::test_what_failed_on_one_rank_is_undone_on_all",
    ),
    Mutant(
        "checkpoint/huggingface",
        "tied weights are initialised under every name",
        '    return set(getattr(model, "all_tied_weights_keys", None) or ())\n',
        "    return set()\n",
        "initialise::test_numbers_are_the_unsharded_models_on_any_number_of_ranks",
    ),
    Mutant(
        "engine/outside",
        "what is looked up behind a failed step does not know that it is a piece",
        "            if (param := self.get(key)) is not None:\n"
        "                be_sharded(param)  # if a step has failed\n",
        "            pass\n",
        "sharded_parameter::test_parameters_are_pieces_behind_a_step_that_failed",
    ),
    Mutant(
        "engine/outside",
        "a state dict behind a failed step holds what does not know that it is a piece",
        "        for param in module._parameters.values():\n"
        "            if param is not None:\n"
        "                be_sharded(param)  # if a step has failed\n",
        "",
        "sharded_parameter::test_parameters_are_pieces_behind_a_step_that_failed",
    ),
    Mutant(
        "unit/step_grads",
        "optimizers step on parameters that are no plain ones",
        "        be_plain(param)\n",
        "",
        "sharded_parameter::test_optimizers_step_on_plain_parameters",
    ),
    Mutant(
        "unit/step_grads",
        "behind a step parameters do not know that they are pieces",
        "        be_sharded(param)\n",
        "",
        "sharded_parameter::test_optimizers_step_on_plain_parameters",
    ),
    Mutant(
        "unit/sharded_parameter",
        "changes through data are not noticed",
        "            return ShardedTensor.wrap(self.detach(), untraced(self._sharding))\n",
        "            return ShardedTensor.wrap(_data.__get__(self), untraced(self._sharding))\n",
        "cases_graphs::test_weights_changed_between_a_forward_and_its_backward_raise",
    ),
    Mutant(
        "unit/sharded_parameter",
        "what the user puts in the place of a gradient is not known until it is read",
        "            _grad.__set__(self, grad)\n            if type(grad) is torch.Tensor:\n",
        "            _grad.__set__(self, grad)\n            if False:\n",
        "pieces::test_the_users_own_tensors_know_what_they_are_once_they_are_gradients",
    ),
    Mutant(
        "unit/sharded_parameter",
        "what autograd has left is not known as a piece",
        "            grad: torch.Tensor | None = _grad.__get__(self)\n            if type(grad) is torch.Tensor:\n",
        "            grad: torch.Tensor | None = _grad.__get__(self)\n            if False:\n",
        "pieces::test_gradients_of_penalties_alone_are_clipped_by_their_global_norm",
    ),
    Mutant(
        "unit/sharded_tensor",
        "sizes are those of pieces",
        "    return func(*map(_whole_of, args), **{key: _whole_of(value) for key, value in kwargs.items()})\n",
        "    return func(*args, **kwargs)\n",
        "sharded_parameter::test_sizes_are_those_of_the_whole",
    ),
    Mutant(
        "unit/unreduced_grad",
        "a gradient that waits has the size of a piece",
        "            return func(args[0].whole, *args[1:], **(kwargs or {}))\n",
        "            pass\n",
        "sharded_parameter::test_gradients_that_wait_have_the_sizes_of_the_whole",
    ),
    Mutant(
        "unit/step_grads",
        "an optimizer sees gradients of the whole's shape",
        "        grad.__class__ = torch.Tensor  # type: ignore[assignment]  # of which it was made\n",
        "",
        "step_grads::test_in_a_step_all_shapes_are_those_of_pieces",
    ),
    Mutant(
        "unit/sharded_parameter",
        "a whole gradient is cut out of a buffer that others read",
        "        if grad._is_view() or grad.untyped_storage().nbytes() != grad.nbytes:\n",
        "        if False:\n",
        "sharded_parameter::test_whole_gradients_are_cut_where_they_are_put",
    ),
    Mutant(
        "unit/sharded_tensor",
        "what has the shape of a piece by chance is broadcast to it",
        "        if not sharding.takes(value.shape) or target.shape != sharding.local_shape:\n"
        "            if value.shape == target.shape:\n"
        "                return value\n"
        "            _refuse_op(self._func, target)\n",
        "        if not sharding.takes(value.shape) or target.shape != sharding.local_shape:\n"
        "            return value\n",
        "sharded_parameter::test_computing_with_a_piece_as_if_it_were_the_weight_names_the_parameter",
    ),
    Mutant(
        "unit/sharded_tensor",
        "a row that has the shape of a piece is taken for one",
        "sharding.is_ambiguous(value.shape):",
        "False:",
        "sharded_parameter::test_a_row_as_long_as_a_piece_is_not_taken_for_one",
    ),
    Mutant(
        "unit/sharded_tensor",
        "a whole tensor that is learnt has a gradient where a rank has all of it alone",
        "        if not is_differentiated and (value.numel() == 1 or value.shape == target.shape):\n",
        "        if value.numel() == 1 or value.shape == target.shape:\n",
        "sharded_parameter::test_what_is_whole_gets_all_of_its_gradient",
    ),
    Mutant(
        "unit/sharding",
        "pieces that are cut at different places are put together",
        "        same = self.runs == other.runs and self.whole.shape == other.whole.shape\n",
        "        same = self.whole.shape == other.whole.shape\n",
        "sharded_parameter::test_what_would_be_of_one_piece_raises",
    ),
    Mutant(
        "unit/sharding",
        "a transposed weight is put together with one that is not",
        "        return same and self.whole.stride() == other.whole.stride()\n",
        "        return same\n",
        "pieces::test_what_would_be_of_one_piece_raises",
    ),
    Mutant(
        "unit/sharding",
        "a part of a vector of several begins where this rank's does",
        "        before = sum(max(min(stop, first) - start, 0) for start, stop in self.runs)\n",
        "        before = 0\n",
        "sharded_parameter::test_what_is_written_by_place_is_written_where_it_is",
    ),
    Mutant(
        "unit/sharding",
        "in a vector of several all begin at its start",
        "            (end - size + start, end - size + stop)\n",
        "            (start, stop)\n",
        "pieces",
    ),
    Mutant(
        "unit/sharding",
        "a part counts from where the whole does",
        "        runs = tuple((start - first, stop - first) for start, stop in inside if start < stop)\n",
        "        runs = tuple((start, stop) for start, stop in inside if start < stop)\n",
        "pieces",
    ),
    Mutant(
        "unit/sharding",
        "a part that lies apart is taken for one that does not",
        "        if not self.is_in_order or not part.is_contiguous():\n",
        "        if not self.is_in_order:\n",
        "pieces::test_what_would_be_of_one_piece_raises",
    ),
    Mutant(
        "unit/sharding",
        "one number for each of other rows is put together with rows",
        "        return mine[0] == theirs[0] and self._rows() == other._rows()\n",
        "        return True\n",
        "aligned_pieces::test_rows_are_put_together_with_numbers_of_the_same_rows",
    ),
    Mutant(
        "unit/sharded_tensor",
        "one element is what this rank has of it",
        "    total = global_sum(piece.as_subclass(torch.Tensor).detach().sum(dtype=torch.float64), ",
        "    total, _ = (piece.as_subclass(torch.Tensor).detach().sum(dtype=torch.float64), ",
        "pieces::test_numbers_of_a_gradient_are_of_all_ranks",
    ),
    Mutant(
        "unit/sharded_tensor",
        "rows by numbers are a piece",
        "    part = piece.sharding.part(whole) if is_view else None\n",
        "    part = piece.sharding.part(whole)\n",
        "sharded_parameter::test_what_would_be_of_one_piece_raises",
    ),
    Mutant(
        "engine/grad_inputs",
        "a rank whose graph has nothing of what is asked for takes no part",
        "                if engine.backwards == count and not engine.is_alone and not in_backward():\n",
        "                if False:\n",
        "grad_inputs::test_gradients_that_are_asked_for_are_plain_pytorchs",
    ),
    Mutant(
        "unit/sharded_tensor",
        "gradients that torch makes of nothing are no pieces",
        "        if isinstance(given, ShardedTensor) and type(grad) is torch.Tensor:\n",
        "        if False:\n",
        "grad_inputs::test_gradients_that_are_asked_for_are_plain_pytorchs",
    ),
    Mutant(
        "unit/sharded_tensor",
        "a mask of a whole row chooses of pieces",
        "    if mask.shape != piece.shape:\n        _refuse_op(func, piece)\n",
        "",
        "sharded_parameter::test_what_would_be_of_one_piece_raises",
    ),
    Mutant(
        "unit/sharded_tensor",
        "what is of a piece's dtype is a piece",
        "        return _known(func, result, args, {}) if args[0] is piece else result\n",
        "        return _known(func, result, args, {})\n",
        "pieces::test_numbers_of_a_gradient_are_of_all_ranks",
    ),
    Mutant(
        "unit/sharded_tensor",
        "of a list only what comes first is fitted",
        "    if not is_alone:\n",
        "    if not is_alone and type(args[0]) is not list:\n",
        "sharded_parameter::test_what_is_whole_is_cut_for_pieces",
    ),
    Mutant(
        "unit/sharded_tensor",
        "random numbers of all pieces are the same",
        "    mine = sharding.cut(drawn).view(piece.shape)\n",
        "    mine = drawn.reshape(-1)[: piece.numel()].view(piece.shape).clone()\n",
        "sharded_parameter::test_random_numbers_are_those_of_the_whole",
    ),
    Mutant(
        "unit/sharded_tensor",
        "a gradient is divided by this rank's part of its norm",
        "        if UnreducedGrad in types or PartialNorm in types:",
        "        if UnreducedGrad in types:",
        "pieces::test_gradients_are_put_together_with_their_global_norms",
    ),
    Mutant(
        "unit/sharded_tensor",
        "safetensors writes pieces",
        'and sys._getframe(1).f_globals.get("__name__") == "safetensors.torch":',
        "and False:",
        "sharded_parameter::test_what_would_be_of_one_piece_raises",
    ),
    Mutant(
        "unit/sharded_tensor",
        "another object is wrapped, with a node of its own",
        "        if type(piece) is not torch.Tensor:\n",
        "        if True:\n",
        "sharded_parameter::test_the_node_that_accumulates_is_found_as_ever",
    ),
    Mutant(
        "unit/sharded_tensor",
        "a number that weighs pieces has the gradient of this rank's alone",
        "            return replicate(value, ranks)\n",
        "            return value\n",
        "sharded_parameter::test_penalties_are_those_of_whole_parameters",
    ),
    Mutant(
        "unit/sharding",
        "of a whole tensor what belongs to a piece is cut for a transposed one",
        "        return self.whole is not None and self.whole.is_contiguous()\n",
        "        return self.whole is not None\n",
        "pieces::test_what_would_be_of_one_piece_raises",
    ),
    Mutant(
        "unit/sharded_tensor",
        "what is written into a whole tensor is lost",
        "            if isinstance(written, torch.Tensor) and written.shape != self._target.shape:\n"
        "                _refuse_op(func, self._target)\n",
        "",
        "sharded_parameter::test_what_would_be_of_one_piece_raises",
    ),
    Mutant(
        "unit/norms",
        "what reads a norm without asking gets this rank's part",
        "_nan(local.dtype, local.device).expand(local.shape).as_subclass(cls)",
        "local.detach().as_subclass(cls)",
        "pieces::test_what_reads_a_norm_without_asking_gets_nan",
    ),
    Mutant(
        "unit/norms",
        "what is written into a norm is lost",
        "    if norm._whole is None:\n",
        "    if True:\n",
        "pieces::test_gradients_are_put_together_with_their_global_norms",
    ),
    Mutant(
        "unit/sharded_tensor",
        "a norm that is differentiated is this rank's for functions of the user's own",
        "    if not (torch.is_grad_enabled() and local.requires_grad):\n        return PartialNorm",
        "    if True:\n        return PartialNorm",
        "sharded_parameter::test_penalties_are_those_of_whole_parameters",
    ),
    Mutant(
        "unit/sharded_tensor",
        "a norm is nan where it is a number",
        "            args, kwargs = look_at_norms(args), look_at_norms(kwargs)\n",
        "            pass\n",
        "sharded_parameter::test_what_is_written_by_place_is_written_where_it_is",
    ),
    Mutant(
        "unit/sharded_tensor",
        "what one mask selects is written where another does",
        "        if isinstance(value, ShardedTensor) or isinstance(value, torch.Tensor) and value.numel() != 1:\n",
        "        if False:\n",
        "sharded_parameter::test_what_would_be_of_one_piece_raises",
    ),
    Mutant(
        "unit/sharding",
        "what two masks select is put together",
        "            return self is other\n",
        "            return True\n",
        "sharded_parameter::test_what_would_be_of_one_piece_raises",
    ),
    Mutant(
        "unit/sharding",
        "of several numbers of a row there is one",
        "        runs = tuple((start * numel, stop * numel) for start, stop in self._rows())\n",
        "        runs = tuple(self._rows())\n",
        "aligned_pieces::test_statistics_of_blocks_of_rows_are_of_rows",
    ),
    Mutant(
        "unit/sharded_tensor",
        "rows by numbers are written over in every piece",
        "    mine = sharding.cut(is_written)\n",
        "    mine = torch.ones_like(sharding.cut(is_written))\n",
        "sharded_parameter::test_what_is_written_by_place_is_written_where_it_is",
    ),
    Mutant(
        "unit/sharded_tensor",
        "a hook of what was computed is given a bare piece",
        "    return func(piece, hook if isinstance(piece, torch.nn.Parameter) else of_piece)\n",
        "    return func(piece, hook)\n",
        "sharded_parameter::test_gradients_in_hooks_of_what_is_computed_are_pieces",
    ),
    Mutant(
        "unit/global_ops",
        "the largest of whole numbers is that of this rank's",
        "        return global_extreme(local.double(), largest=largest, ranks=ranks).to(local.dtype)\n",
        "        return local.amax() if largest else local.amin()\n",
        "pieces::test_numbers_of_a_gradient_are_of_all_ranks",
    ),
    Mutant(
        "unit/global_ops",
        "squares of 16 bits are summed in them",
        "    total = local.to(torch.promote_types(local.dtype, torch.float32), copy=True)",
        "    total = local.clone()",
        "pieces::test_numbers_of_a_gradient_are_of_all_ranks",
    ),
    Mutant(
        "unit/sharded_parameter",
        "whole data are put under a piece",
        "            elif tuple(data.shape) == piece.shape != piece.local_shape:\n",
        "            elif False:\n",
        "sharded_parameter::test_what_would_be_of_one_piece_raises",
    ),
    Mutant(
        "unit/global_ops",
        "of a sum each piece has the gradient of its own rank's loss",
        "        return _mean_over_ranks(grad, ctx.ranks), None\n",
        "        return grad.clone(), None\n",
        "sharded_parameter::test_penalties_are_those_of_whole_parameters",
    ),
    Mutant(
        "unit/global_ops",
        "of a norm each piece has the gradient of its own rank's loss",
        "        return _mean_over_ranks(grad, ctx.ranks) * share, None, None\n",
        "        return grad * share, None, None\n",
        "sharded_parameter::test_penalties_are_those_of_whole_parameters",
    ),
    Mutant(
        "unit/global_ops",
        "of a whole tensor only this rank's elements get a gradient",
        "        ctx.ranks.all_reduce(whole)\n        return whole, None, None\n",
        "        return whole, None, None\n",
        "sharded_parameter::test_what_is_whole_gets_all_of_its_gradient",
    ),
    Mutant(
        "unit/global_ops",
        "elements that share the maximum have each all of its gradient",
        ".sum(), ranks) / count\n",
        ".sum(), ranks)\n",
        "sharded_parameter::test_penalties_are_those_of_whole_parameters",
    ),
    Mutant(
        "unit/buffers",
        "what other ranks may read is freed under a collective",
        "            self._streams.keep(buffer)\n",
        "            if not is_visible:\n                self._streams.keep(buffer)\n",
        "device_memory",
    ),
    Mutant(
        "build",
        "main grads are cut out of what parameters leave",
        "        unit.reserve_grads()\n    for unit, parts in zip(engine.units, checked.parts, strict=True):\n",
        "        pass\n    for unit, parts in zip(engine.units, checked.parts, strict=True):\n"
        "        unit.reserve_grads()\n",
        "device_memory",
    ),
    Mutant(
        "build",
        "what parameters took stays with the allocator",
        "        engine.streams.module.empty_cache()\n",
        "        pass\n",
        "device_memory",
    ),
    Mutant(
        "checkpoint/huggingface",
        "files that have the base model's prefix do not fit it",
        '    prefix = {"base_model_prefix": model.base_model_prefix, "meta_state_dict": wanted}\n',
        '    prefix: dict[str, Any] = {"base_model_prefix": None, "meta_state_dict": wanted}\n',
        "load::test_a_base_model_and_one_with_a_head_load_each_others_weights",
    ),
    Mutant(
        "integrations/accelerate",
        "a model that is only evaluated has room for gradients",
        "                param.requires_grad_(False)\n",
        "                pass\n",
        "accelerate::test_a_reference_model_is_sharded_and_has_no_gradients",
    ),
    Mutant(
        "integrations/accelerate",
        "gradients of fp16 are not unscaled on CPUs before they are clipped",
        "            self.native_amp = True\n",
        "            pass\n",
        "accelerate::test_fp16_scales_losses_on_cpus_too",
    ),
    Mutant(
        "integrations/accelerate_launch",
        "processes on CPUs do not know of each other",
        '        return {**given, "cpu": True}\n',
        "        return given\n",
        "accelerate_options::test_processes_that_do_not_know_of_each_other",
    ),
    Mutant(
        "integrations/accelerate_join",
        "a rank that has run out does not clip",
        "            self._acts[key] = act\n",
        '            if key != "norm":\n                self._acts[key] = act\n',
        "accelerate::test_uneven_inputs_from_loaders_with_clipping",
    ),
    Mutant(
        "integrations/accelerate_state",
        "what is left of an epoch that is over is given back",
        "loader.load_state_dict({} if is_over else",
        "loader.load_state_dict(",
        "stateful_loader::test_a_prepared_one_goes_on_within_an_epoch",
    ),
    Mutant(
        "integrations/accelerate_state",
        "an epoch that is gone on with is shuffled anew",
        "sampler.drawn_from if within else after",
        "after",
        "accelerate_state::test_a_run_goes_on_within_an_epoch",
    ),
    Mutant(
        "integrations/accelerate_state",
        "a loader that is entered within an epoch takes random numbers from the run",
        "            torch.set_rng_state(self.goes_on_with)\n",
        "",
        "accelerate_state::test_a_run_goes_on_within_an_epoch",
    ),
    Mutant(
        "integrations/accelerate_state",
        "the newest checkpoints go",
        "[:-limit]",
        "[-limit:]",
        "accelerate_state::test_checkpoints_are_numbered_and_only_the_latest_kept",
    ),
    Mutant(
        "engine/handle",
        "ranks that have generated enough do not wait for the others",
        " == dist.get_world_size() > 1\n",
        " == 0\n",
        "transformers::test_generating_evaluation_of_unequal_lengths",
    ),
    Mutant(
        "integrations/transformers",
        "weights of a checkpoint are not loaded once the model is sharded",
        "            load_safetensors(self.model, self._resumed_from)\n",
        "            pass\n",
        "transformers::test_ddp_goes_on_from_our_checkpoints_and_we_from_theirs",
    ),
    Mutant(
        "integrations/accelerate",
        "a reference model that is to stay whole is sharded",
        "evaluation_mode and not self.shard_references\n",
        "False\n",
        "accelerate::test_a_reference_model_stays_whole_where_that_is_asked_for",
    ),
    Mutant(
        "integrations/transformers",
        "a model is evaluated as it is if a reference model was prepared before",
        "        if not training and wrapped is self.model and _engine(wrapped) is None:\n",
        "        if False:\n",
        "trl::test_dpo_equals_ddp",
    ),
    Mutant(
        "integrations/transformers",
        "bf16_full_eval evaluates in fp32",
        "            self.model.to(dtype)\n",
        "            pass\n",
        "transformers::test_a_run_that_only_evaluates_is_ddps",
    ),
    Mutant(
        "integrations/transformers",
        "the best checkpoint is known by the name under which it was written",
        "            self.state.best_model_checkpoint = str(checkpoint.path)\n",
        "            pass\n",
        "transformers::test_the_best_model_is_loaded_at_the_end",
    ),
    Mutant(
        "integrations/transformers",
        "checkpoints are pushed before they are whole",
        "        if self._checkpoint is None:  # else once it has its name: uploads go on in the background\n",
        "        if True:\n",
        "transformers::test_whole_checkpoints_are_pushed",
    ),
    Mutant(
        "integrations/transformers",
        "what one rank meets behind the last exchange is not heard of by the others",
        "                    if not checkpoint.is_collected:\n                        raise\n",
        "                    raise\n",
        "transformers::test_an_error_of_a_save_is_raised_on_all_ranks_and_leaves_nothing",
    ),
    Mutant(
        "unit/pieces",
        "accelerate's own class saves pieces",
        '        if frame.f_globals.get("__name__") in _ACCELERATE:\n',
        "        if False:\n",
        "accelerate_state::test_accelerates_own_class_saves_no_pieces",
    ),
    # -- segments
    Mutant(
        "engine/engine",
        "what a backward trains for the first time is not widened",
        "        self._widen()\n        for unit",
        "        for unit",
        "segments",
    ),
    Mutant(
        "engine/engine",
        "ranks do not compare what they widen",
        '        if not self.ranks.are_equal("\\n".join(names)):\n',
        "        if False:\n",
        "segments::test_ranks_have_to_unfreeze_the_same_parameters",
    ),
    Mutant(
        "engine/casts",
        "nobody asks whether gathers read main weights",
        "        if any(segment.gathers_main for unit in self._units for segment in unit.segments):  #",
        "        if False:  #",
        "segments::test_a_frozen_weight_can_be_changed_as_soon_as_a_forward_is_over",
    ),
    Mutant(
        "unit/shard",
        "what is widened has no values",
        "            piece.copy_(param.detach())\n",
        "",
        "segments::test_unfreezing_widens_in_place",
    ),
    Mutant(
        "unit/shard",
        "shards that others have are of what was before it was widened",
        "            shard.piece.data = piece  # whoever has the shard\n",
        "",
        "segments",
    ),
    Mutant(
        "unit/shard",
        "a compute shard is filed under frozen weights when it is none any more",
        "            self._ledger.file_under(Category.COMPUTE_SHARDS, before)\n",
        "            pass\n",
        "segments::test_unfreezing_widens_in_place",
    ),
    Mutant(
        "unit/unit",
        "a unit's last segment is not gathered",
        "for segment in self.segments])\n        slot.content",
        "for segment in self.segments[:1]])\n        slot.content",
        "segments",
    ),
    Mutant(
        "unit/grads",
        "only a unit's first segment is reduced",
        "[segment.start_reduce() for segment in self.segments]",
        "[segment.start_reduce() for segment in self.segments[:1]]",
        "fp32_modules",
    ),
    Mutant(
        "unit/grads",
        "a parameter without room counts",
        "        if not grad.has_room:\n            return False\n",
        "",
        "segments",
    ),
    Mutant(
        "plan/segments",
        "segments of a unit begin at the same place of its slot",
        "            weight_start += segment.weight_bytes\n",
        "",
        "segments",
    ),
    Mutant(
        "plan/segments",
        "trained segments of a unit begin at the same place of its grad slot",
        "            grad_starts[kind.trains] += segment.grad_bytes\n",
        "",
        "fp32_modules",
    ),
    Mutant(
        "plan/segments",
        "what is frozen has fp32 main weights",
        "    main = fp32 if trains else dtype\n",
        "    main = fp32\n",
        "segments::test_what_is_reduced_and_held_is_what_trains",
    ),
    Mutant(
        "plan/segments",
        "what is in fp32 is reduced as the rest",
        "        return SegmentKind(trains, fp32, fp32, fp32, ReductionMode.FP32)\n",
        "        return SegmentKind(trains, fp32, fp32, precision.slot_grad_dtype, precision.reduction_mode)\n",
        "fp32_modules",
    ),
    Mutant(
        "plan/memory",
        "Adam has moments of what is frozen",
        "for segment in self.segments if segment.tag in self.trains)\n\n    def scratch",
        "for segment in self.segments)\n\n    def scratch",
        "segments",
    ),
    Mutant(
        "plan/memory",
        "segments of a unit have the same scratch",
        "                start += n_bytes\n",
        "",
        "fp32_modules",
    ),
    Mutant(
        "plan/fp32",
        "a part of a word is enough",
        "(^|\\.){re.escape(part)}(\\.|$)",
        "{re.escape(part)}",
        "fp32_modules",
    ),
    Mutant(
        "plan/fp32",
        "norms with running statistics compute as the rest",
        "            yield module\n",
        "            yield from ()\n",
        "fp32_modules",
    ),
    Mutant(
        "engine/hooks",
        "what is in fp32 inside a layer gives fp32 on",
        "return output if given is None else _cast(output, given)",
        "return output",
        "fp32_modules",
    ),
    Mutant(
        "unit/unit",
        "with one rank all weights of a unit count their changes together",
        "                if is_alone:  # nobody",
        "                if False:  # nobody",
        "edits::test_a_weight_may_be_changed_after_others_were_saved",
    ),
    Mutant(
        "engine/attach",
        "units in fp32 are given half precision",
        "            return torch.float32\n",
        "            return precision.param_dtype\n",
        "fp32_modules",
    ),
    # -- checkpoints
    Mutant(
        "checkpoint/directory",
        "keep deletes the newest ones",
        "_whole_ones(path.parent)[:-keep]:",
        "_whole_ones(path.parent)[keep:]:",
        "training_state::test_keep_deletes_the_oldest_ones",
    ),
    Mutant(
        "checkpoint/directory",
        "keep deletes what was just saved, where the clock went back",
        "if found.path != path and _try_to_delete",
        "if _try_to_delete",
        "directory::test_the_one_that_was_just_saved_stays",
    ),
    Mutant(
        "checkpoint/directory",
        "files of the latest are not looked at",
        "            check_sizes(path, manifest)\n",
        "",
        "directory::test_the_latest_is_the_latest_that_is_whole",
    ),
    Mutant(
        "checkpoint/directory",
        "what was put aside is deleted, not put back",
        "                os.replace(left, own)",
        "                _try_to_delete(left)",
        "directory::test_one_that_was_put_aside_is_found_and_gets_its_name_back",
    ),
    Mutant(
        "checkpoint/directory",
        "what is no checkpoint is written over",
        "    if os.path.lexists(path) and not (path / MANIFEST_NAME).exists()",
        "    if False and not (path / MANIFEST_NAME).exists()",
        "training_state::test_what_is_no_checkpoint_is_not_replaced",
    ),
    Mutant(
        "checkpoint/directory",
        "the one that is replaced is deleted first",
        "            os.replace(path, replaced)\n        os.replace(partial, path)",
        "            shutil.rmtree(path)\n        os.replace(partial, path)",
        "training_state::test_an_error_anywhere_leaves_what_was_there_or_the_new_one",
    ),
    Mutant(
        "checkpoint/directory",
        "what an error has left half published is not taken back",
        "            _take_back(partial, path, replaced)\n",
        "            pass\n",
        "training_state::test_an_error_anywhere_leaves_what_was_there_or_the_new_one",
    ),
    Mutant(
        "checkpoint/directory",
        "the manifest comes after the directory has its name",
        "    sync_directory(partial)\n    path = ",
        '    os.replace(partial / MANIFEST_NAME, partial / "m")\n    path = ',
        "training_state::test_keep_deletes_the_oldest_ones",
    ),
    Mutant(
        "checkpoint/manifest",
        "a manifest is not compared with its checksum",
        "    if text != expected:",
        "    if False:",
        "training_state::test_damage_anywhere_is_noticed_before_anything_changes",
    ),
    Mutant(
        "checkpoint/manifest",
        "a newer format is read",
        '    if content["format"] != FORMAT:',
        "    if False:",
        "training_state::test_a_newer_format_is_refused_by_its_version",
    ),
    Mutant(
        "checkpoint/manifest",
        "sizes of files are not compared",
        "        if size_bytes != record.size_bytes:",
        "        if False:",
        "directory::test_the_latest_is_the_latest_that_is_whole",
    ),
    Mutant(
        "checkpoint/piece_files",
        "files are not compared with their checksums",
        "advance) != record.crc32:",
        'advance) == "":',
        "training_state::test_damage_anywhere_is_noticed_before_anything_changes",
    ),
    Mutant(
        "checkpoint/piece_files",
        "all ranks verify the same files",
        "self._manifest.files[ranks.number :: ranks.total_size]",
        "self._manifest.files[:: ranks.total_size]",
        "training_state::test_damage_anywhere_is_noticed_before_anything_changes",
    ),
    Mutant(
        "checkpoint/piece_files",
        "a checkpoint that was replaced while it was opened is read",
        "        if read_manifest(self._path) != self._manifest:",
        "        if False:",
        "training_state::test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_not_mixed",
    ),
    Mutant(
        "checkpoint/stored_files",
        "files that were written to meanwhile are believed",
        "            if now != file.identity:",
        "            if False:",
        "training_state::test_a_file_that_is_written_to_while_it_is_loaded_is_named",
    ),
    Mutant(
        "checkpoint/stored_files",
        "an export is not compared with its checksums",
        "            if self.sums and hash_file",
        "            if False and hash_file",
        "load::test_flipped_bytes_are_noticed_before_anything_changes",
    ),
    Mutant(
        "checkpoint/piece_file",
        "all chunks are read from where the first is",
        "        _read(stored, start + done, chunk",
        "        _read(stored, start, chunk",
        "piece_file::test_files_are_written_and_read_chunk_by_chunk",
    ),
    Mutant(
        "checkpoint/piece_file",
        "a checksum is the last chunk's",
        "zlib.crc32(chunk, checksum)",
        "zlib.crc32(chunk)",
        "piece_file::test_files_are_written_and_read_chunk_by_chunk",
    ),
    Mutant(
        "checkpoint/save_job",
        "what an error has left stays",
        "                remove_partial(partial)\n",
        "                pass\n",
        "training_state::test_an_error_of_one_rank_is_raised_on_all_and_leaves_nothing",
    ),
    Mutant(
        "checkpoint/restore",
        "what does not fit is left out although it is strict",
        "    if wrong and strict:",
        "    if False:",
        "training_state::test_what_does_not_fit_is_named_and_nothing_changes",
    ),
    Mutant(
        "checkpoint/restore",
        "an optimizer of any class takes the state",
        '    elif saved["class"] != class_name(optimizer):',
        "    elif False:",
        "training_state::test_what_does_not_fit_is_named_and_nothing_changes",
    ),
    Mutant(
        "checkpoint/restore",
        "random states stay as they are",
        "                plan.finish.append(partial(set_random_state, state, device))\n",
        "                pass\n",
        "training_state::test_a_run_goes_on_to_the_bit",
    ),
    Mutant(
        "checkpoint/restore",
        "buffers that are not contiguous are read into a copy",
        "    plan.finish.append(partial(put_back_buffers, model, pieces))\n",
        "",
        "training_state::test_buffers_that_are_not_contiguous_come_back",
    ),
    Mutant(
        "checkpoint/load",
        "what does not fit is left out although it is strict",
        "        if strict and plan.difference.size:",
        "        if False:",
        "load::test_load_names_what_does_not_fit_and_changes_nothing",
    ),
    Mutant(
        "checkpoint/disk_layout",
        "buffers without values are taken for buffers",
        "                if buffer.is_meta:",
        "                if False:",
        "training_state::test_a_buffer_without_values_on_one_rank_is_named_on_all",
    ),
    Mutant(
        "checkpoint/collect",
        "what differs between ranks is saved as the first has it",
        "        if any(theirs[name] != digests[0][name] for theirs in digests):",
        "        if False:",
        "training_state::test_several_models_optimizers_and_objects",
    ),
    Mutant(
        "checkpoint/collect",
        "of replicas that train on their own one is saved",
        "    drifts = drifts_apart(engine)\n",
        "    drifts = False\n",
        "training_state::test_replicas_that_train_on_their_own_are_all_saved",
    ),
    Mutant(
        "checkpoint/optimizer_state",
        "state that only some ranks keep is saved as the first has it",
        "            if list(first) != list(outline):",
        "            if False:",
        "training_state::test_state_that_only_some_ranks_keep_is_named",
    ),
    Mutant(
        "checkpoint/tree",
        "what contains itself is followed for ever",
        "        if id(value) in around:",
        "        if False:",
        "tree::test_what_contains_itself_is_refused_by_its_path",
    ),
    Mutant(
        "checkpoint/tree",
        "what is there twice is taken to contain itself",
        "        del around[id(value)]\n",
        "",
        "tree::test_what_contains_itself_is_refused_by_its_path",
    ),
    Mutant(
        "checkpoint/host_copies",
        "training goes on in what is being written",
        "self._copies.append(piece._replace(data=copy))",
        "self._copies.append(piece)",
        "training_state::test_saving_in_the_background_saves_what_was_there",
    ),
    Mutant(
        "checkpoint/host_copies",
        "a rank that could not copy writes what it has",
        "            if self._failure is not None:\n",
        "            if False:\n",
        "training_state::test_a_rank_that_cannot_copy_lets_the_others_know",
    ),
    Mutant(
        "checkpoint/host_copies",
        "a step does not wait for what is copied late",
        "            self._is_copied.wait()\n",
        "            pass\n",
        "host_copies::test_a_step_right_after_the_call_waits",
    ),
    Mutant(
        "checkpoint/host_copies",
        "a step on a device does not wait for what is copied late",
        ".wait_event(self._event)",
        "",
        "host_copies::test_on_a_device_only_the_steps_stream_waits",
    ),
    Mutant(
        "checkpoint/host_copies",
        "what a device has not copied yet is written",
        "                    self._event.synchronize()\n",
        "                    pass\n",
        "host_copies::test_on_a_device_only_the_steps_stream_waits",
    ),
    Mutant(
        "checkpoint/host_copies",
        "a device copies before what is computed is there",
        "            stream.wait_stream(module.current_stream(self._device))\n",
        "",
        "host_copies::test_on_a_device_only_the_steps_stream_waits",
    ),
    Mutant(
        "checkpoint/host_copies",
        "edits are looked for once moments are copied",
        "            return self._copies\n",
        "            self.check()\n            return self._copies\n",
        "host_copies::test_an_edit_of_moments_meanwhile_is_refused_on_all_ranks",
    ),
    Mutant(
        "checkpoint/host_copies",
        "what steps change is taken for an edit",
        "        self._look_for_edits()\n\n    def check",
        "\n    def check",
        "host_copies::test_a_step_right_after_the_call_waits",
    ),
    Mutant(
        "training_state",
        "what was edited while it was copied is published",
        "job.write(group, check=copies.check)",
        "job.write(group)",
        "host_copies::test_an_edit_of_moments_meanwhile_is_refused_on_all_ranks",
    ),
    Mutant(
        "unit/optimizer_hooks",
        "steps that no hook sees are taken to be seen",
        "    return isinstance(inner, Optimizer) and inner.state is optimizer.state and sees_steps(inner)\n",
        "    return True\n",
        "host_copies::test_which_steps_are_seen",
    ),
    Mutant(
        "checkpoint/background",
        "errors of the background are not raised by the next call",
        "        saving.finish(ranks)\n",
        "        saving._thread.join()\n",
        "training_state::test_what_fails_in_the_background_is_raised_by_the_next_call",
    ),
    Mutant(
        "checkpoint/background",
        "who has waited for an error does not raise it with the others",
        "ranks.any_rank(not self._is_told)",
        "not self._is_told",
        "training_state::test_what_one_rank_has_waited_for_is_raised_on_all_by_the_next_call",
    ),
    Mutant(
        "checkpoint/background",
        "ranks wait as long for a group as for the disk",
        "dist.new_group(members, MADE_WITHIN,",
        "dist.new_group(members, WRITTEN_WITHIN,",
        "training_state::test_a_rank_that_dies_before_the_first_save_in_the_background_is_missed",
    ),
    Mutant(
        "checkpoint/background",
        "ranks wait as long for the disk as for a group",
        "options.timeout = WRITTEN_WITHIN",
        "options.timeout = MADE_WITHIN",
        "training_state::test_how_long_ranks_wait_for_a_slow_disk_is_not_how_long_they_wait_for_a_group",
    ),
    Mutant(
        "checkpoint/background",
        "SIGTERM ends a save that is running",
        "    if _running is None or _running.done:\n        signal",
        "    if True:\n        signal",
        "training_state::test_a_script_that_is_terminated_ends_after_the_save",
    ),
    Mutant(
        "checkpoint/publish",
        "the old file goes before the new ones are there",
        "    for file in files:\n        undo.callback(_remove, root / file.name)\n",
        "    _remove(root / SINGLE_NAME)\n    for file in files:\n        undo.callback(_remove, root / file.name)\n",
        "publish::test_export_killed_anywhere_leaves_the_old_one_or_the_new",
    ),
    Mutant(
        "checkpoint/publish",
        "an earlier config is not put back after an error",
        "            undo.callback(os.replace, kept, target)\n",
        "            pass\n",
        "publish::test_config_stays_with_its_weights_after_an_error",
    ),
    Mutant(
        "checkpoint/publish",
        "writes that the system takes in parts go to one place",
        "data[written:], offset + written",
        "data[written:], offset",
        "writer::test_short_writes_are_continued",
    ),
    Mutant(
        "checkpoint/writer",
        "ranks do not compare the headers of their files",
        "                if os.pread(descriptor, len(file.header), 0) != file.header:",
        "                if False:",
        "writer::test_ranks_with_different_tensors_do_not_mix_them",
    ),
    Mutant(
        "training_state",
        "arguments that differ between ranks are taken",
        "            if value != firsts[name]:",
        "            if False:",
        "training_state::test_arguments_that_differ_between_ranks",
    ),
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
                f"{number + 1}/{len(mutants)} {outcome.seconds:5.1f} s  {outcome.result:14}  {mutant.file}: "
                f"{mutant.what}  {outcome.caught_by}",
                file=sys.stderr,
                flush=True,
            )
    return outcomes


def _try(mutant: Mutant, root: Path) -> Outcome:
    path = root / "streamshard" / f"{mutant.file}.py"
    original = path.read_text()
    if original.count(mutant.old) != 1:
        return Outcome(mutant, "does not apply", f"old text found {original.count(mutant.old)} times", 0.0)
    path.write_text(original.replace(mutant.old, mutant.new))
    began = time.monotonic()
    try:
        result, caught_by = _run_tests(mutant, root)
    finally:
        path.write_text(original)
    return Outcome(mutant, result, caught_by, time.monotonic() - began)


def named_tests(mutant: Mutant, root: Path) -> list[tuple[Path, str]]:
    """The tests that are likely to notice it: files, below `root`, and names, empty for all of a file."""
    nodes = [node.partition("::") for name in mutant.tests.split() for node in GROUPS.get(name, name).split()]
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


def _table(outcomes: Sequence[Outcome], *, is_markdown: bool) -> str:
    rows = [(o.mutant.file, o.mutant.what, o.result, o.caught_by) for o in outcomes]
    if is_markdown:
        head = ["| file | change | | by |", "| --- | --- | --- | --- |"]
        return "\n".join(head + ["| " + " | ".join(row).replace("_", r"\_") + " |" for row in rows])
    return "\n".join(f"{result:14}  {file}: {what}  {by}" for file, what, result, by in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module; 1 if a mutant lived or does not apply."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutants whose file or description has one of these")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if not options.words or any(w in f"{m.file}: {m.what}" for w in options.words)]
    outcomes = try_mutants(chosen)
    print(_table(outcomes, is_markdown=options.markdown))
    counts = {result: sum(o.result == result for o in outcomes) for result in ("caught", "lived", "does not apply")}
    print("\n" + ", ".join(f"{count} {result}" for result, count in counts.items()))
    return int(counts["caught"] < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
