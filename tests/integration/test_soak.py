"""The soak notices failures, crashes, hangs and memory growth, and continues where it stopped."""

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from soak import supervisor
from soak.__main__ import PAGE, PARTS, RECORD, main
from soak.part import MIB, Part
from soak.record import State, as_text, read_from_page
from soak.weights import watched


class Planted(Part):
    """Case 1 fails, case 3 crashes, case 5 hangs."""

    name, what, promise = "planted", "planted faults", "none"
    count, per_case, per_chunk, patience = 80, 10, 4, 8.0
    spare_memory = 256 * MIB

    def run(self, case: int) -> Mapping[str, int]:
        if case == 1:
            raise RuntimeError("planted")
        if case == 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        if case == 5:
            time.sleep(1000)
        return {"fine": 1}

    def close(self) -> Mapping[str, float]:
        return {"measured": 2.0}


class Glutton(Part):
    name, what, promise = "glutton", "memory", "none"
    count, per_chunk = 1, 1
    spare_memory = 64 * MIB

    def run(self, case: int) -> Mapping[str, int]:
        return {"kept": len(bytes(os.urandom(1)) * (100 * MIB)) // (100 * MIB)}


def state_of(part: type[Part], **changes: int) -> State:
    return State(part.name, seed=0, cases=part.count // part.per_case, code="c", **changes)


@pytest.mark.slow
def test_failures_crashes_and_hangs_are_found_and_the_rest_still_runs(tmp_path: Path) -> None:
    state = state_of(Planted)
    supervisor.run([(Planted, state)], folder=tmp_path, jobs=2)
    found = {failure.case: failure.text for failure in state.failures}
    assert found.keys() == {1, 3, 5}
    assert "RuntimeError: planted" in found[1]
    assert f"status {-signal.SIGSEGV}" in found[3]
    assert "hung" in found[5]
    assert state.cases_done == 8
    assert state.outcomes == {"fine": 5}
    assert state.measured["measured"] == 2.0


def test_too_much_memory_is_a_failure(tmp_path: Path) -> None:
    state = state_of(Glutton)
    supervisor.run([(Glutton, state)], folder=tmp_path, jobs=1)
    assert "MiB more than it began with" in state.failures[0].text


def test_an_interrupted_soak_goes_on_where_it_stopped(tmp_path: Path) -> None:
    state = state_of(Planted)
    state.chunks_done, state.cases_done = [1], 4  # the chunk of cases 4 to 7
    state.save(tmp_path)
    loaded = State.load(tmp_path, part="planted", seed=0, cases=8, code="c")
    assert loaded == state
    supervisor.run([(Planted, loaded)], folder=tmp_path, jobs=1)
    assert sorted(failure.case for failure in loaded.failures) == [1, 3]
    assert loaded.cases_done == 8
    for changed in (dict(seed=1), dict(cases=9), dict(code="d")):
        asked = dict(part="planted", seed=0, cases=8, code="c") | changed
        assert State.load(tmp_path, **asked).chunks_done == []


@pytest.mark.parametrize("part", ["op", "images", "weights"])
def test_a_case_can_be_run_again(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = []
    for _ in range(2):
        assert main([part, "--case", "0"]) == 0
        outcomes.append(capsys.readouterr().out)
    assert outcomes[0] == outcomes[1]


def test_loaders_are_watched(tmp_path: Path) -> None:
    with watched():
        (tmp_path / "x").exists()
    with pytest.raises(AssertionError, match="for writing"), watched():
        (tmp_path / "x").write_text("x")
    with pytest.raises(AssertionError, match=r"os\.system"), watched():
        os.system("true")


def test_the_page_shows_the_record() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert record["parts"].keys() == PARTS.keys()
    assert read_from_page(PAGE) == as_text(record)
