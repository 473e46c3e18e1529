"""``python -m benchmarks``: what it lists, and the pages and plots of results."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from benchmarks.__main__ import main
from benchmarks._jobs import Job, run_jobs
from benchmarks._picture import draw_memory
from benchmarks._report import render
from tests.launched import ROOT

STEP_TIME = ROOT / "benchmarks" / "results" / "step_time-cpu-8x512-256.json"


def test_the_list_names_every_script_that_measures(monkeypatch: Any, capsys: Any) -> None:
    """A new script has to be added to the list. Modules named _* are shared; gpu.py runs four of the scripts."""
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--list"])
    main()
    names = {line.split()[0].partition(".")[0] for line in capsys.readouterr().out.splitlines()}
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if not path.stem.startswith("_")}
    assert names == scripts - {"facts", "one_device", "overlap", "parity"}


def test_a_report_has_medians_intervals_peers_and_what_is_missing(tmp_path: Path) -> None:
    shutil.copy(STEP_TIME, tmp_path / "step_time.json")
    jobs = {
        "step_time": {"exit_code": 0, "timed_out": False},
        "slow": {"exit_code": -15, "timed_out": True},
        "broken": {"exit_code": 1, "timed_out": False},
        "late": {"not_run": "3 s were left"},
    }
    (tmp_path / "results.json").write_text(json.dumps({"left_out": {"gpu": "needs GPU"}, "jobs": jobs}))
    page = render(tmp_path).read_text()
    entry = json.loads(STEP_TIME.read_text())
    ratio = entry["systems"]["streamshard"]["ratio_to_fsdp2"]
    cell = "{median:.3g} ({median_low:.3g} to {median_high:.3g})".format(**ratio)
    assert cell in next(line for line in page.splitlines() if line.startswith("| streamshard |"))
    assert "| fsdp1 |" in page
    assert entry["environment"]["commit"] in page
    missing = {"gpu": "needs GPU", "slow": "out of time", "broken": "failed: exit code 1", "late": "3 s were left"}
    assert page.splitlines()[-4:] == [f"- {name} is missing or not complete: {why}" for name, why in missing.items()]
    assert (tmp_path / "step_time.png").exists()


def test_the_picture_of_memory_has_what_was_computed_and_that_equals_what_was_measured(tmp_path: Path) -> None:
    """Measured on small models, to 1 %. README.md says some of the numbers, and docs/images/memory.svg all."""
    result = json.loads((ROOT / "benchmarks" / "results" / "memory_by_ranks-cpu.json").read_text())
    measured = result["measured"]
    computed = [each for each in measured.values() if "computed_bytes" in each]
    assert len(computed) == 6
    for each in computed:
        assert each["measured_bytes"] == pytest.approx(each["computed_bytes"], rel=0.01)
    for ranks in (2, 4):
        ways = (f"{ranks} ranks", f"{ranks} ranks, steps inside backward")
        ours, fsdp2 = (
            [measured[f"{system}, {way}"]["measured_bytes"] for way in ways] for system in ("streamshard", "fsdp2")
        )
        assert all(mine < theirs for mine, theirs in zip(ours, fsdp2, strict=True)) and ours[1] < 0.85 * ours[0]
    moments = {"start": result["llama_3_8b_start_gib"], "end of backward": result["llama_3_8b_gib"]}
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_memory(moments, tmp_path / "memory.svg")
    drawn = (tmp_path / "memory.svg").read_text()
    start, end = (each["8 ranks"] for each in moments.values())
    for words in ("FSDP2", "StreamShard", "8 ranks", "end of backward", f"{start['fsdp2']:.1f}", f"{end['fsdp2']:.1f}"):
        assert f">{words}<" in drawn
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{end['streamshard']:.1f} GiB on 8 ranks, FSDP2 {end['fsdp2']:.1f}, DDP {end['ddp']:.1f}" in readme
    assert f"main grads have no memory yet: {start['streamshard']:.1f} GiB, FSDP2 {start['fsdp2']:.1f}" in readme
    for moment in moments.values():  # less than FSDP2 on every number of ranks
        assert all(row["streamshard"] < row["fsdp2"] for row in moment.values())


# The run on a GPU, ``benchmarks/gpu.py``: what it keeps of jobs that fail. ``.ci/run`` rehearses the whole run.


# Rank 1 fails, or all ranks hang, who have left something before.
_WAITING = """
import os, pathlib, sys, time

def wait_for_ever():
    time.sleep(600)

if sys.argv[1] == "fail" and os.environ["RANK"] == "1":
    raise ValueError("rank 1 is wrong")
pathlib.Path(sys.argv[2]).write_text('{"told": "half"}')
wait_for_ever()
"""


def _job(directory: Path, name: str, *command: str, limit_s: float = 60.0) -> Job:
    """One that runs ``python`` with these arguments and the path of its results."""
    found = directory / f"{name}.json"
    return Job(
        name=name,
        command=[sys.executable, *command, str(found)],
        limit_s=limit_s,
        found=found,
        brief=lambda known: known["told"],
        environment={"PYTHONFAULTHANDLER": "1"},
    )


def test_a_job_that_fails_hangs_or_is_killed_leaves_its_results_and_the_reason(tmp_path: Path, capsys: Any) -> None:
    """The next one runs. The reason is the failed rank's error, or a rank's position: never the launcher's."""
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(_WAITING)
    launcher = (str(ROOT / "benchmarks" / "_ranks.py"), "2", str(script))
    words = "import sys; print('words'); open(sys.argv[1], 'w').write('{\"told\": \"all\"}')"
    jobs = [
        _job(tmp_path, "fail", *launcher, "fail"),
        _job(tmp_path, "hang", *launcher, "hang", limit_s=2.0),
        _job(tmp_path, "killed", "-c", "import os; print('much memory', flush=True); os.kill(os.getpid(), 9)"),
        _job(tmp_path, "quick", "-c", words),
    ]
    assert not run_jobs(jobs, out, {"benchmark": "test"}, 100.0)
    found = json.loads((out / "results.json").read_text())["jobs"]
    ended = {name: (job["timed_out"], job["brief"]) for name, job in found.items()}
    assert ended["quick"] == (False, "all") and found["quick"]["exit_code"] == 0
    assert ended["hang"] == (True, "half") and not ended["fail"][0] and ended["killed"] == (False, "found nothing")
    assert "words" in (out / "output.log").read_text()
    assert found["fail"]["reason"] == "ValueError: rank 1 is wrong"
    assert found["hang"]["reason"] == f'it was at File "{script}", line 5 in wait_for_ever'
    assert found["hang"]["output"].count("in wait_for_ever") == 2
    assert found["killed"]["reason"] == "much memory"
    told = capsys.readouterr().out
    assert "FAILED: SIGKILL" in told
    failed = [job for name, job in found.items() if name != "quick"]
    assert all(job["reason"] in told and job["reason"].split()[-1] in job["output"] for job in failed)


# Options of the jobs, and whether tests can be collected, where the tests' packages are not installed.
_BARE = """
import sys
sys.modules.update(dict.fromkeys(("greenlet", "hypothesis", "matplotlib", "pytest_timeout")))
sys.path.insert(0, "benchmarks")
from pathlib import Path
import gpu
jobs = {job.name: job for job in gpu._jobs(Path(sys.argv[1]), Path(sys.argv[1]))}
assert "--profile" in jobs["overlap"].command and "--picture" not in jobs["overlap"].command
import pytest
sys.exit(pytest.main([*jobs["tests.one"].command[3:], "--collect-only", "-q"]))
"""


def test_a_run_on_a_gpu_needs_torch_transformers_and_pytest_alone(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _BARE, str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_gpu.py" in done.stdout
