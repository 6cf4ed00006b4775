"""Some cases of every kind, with fixed seeds; and the harness itself: it notices what is wrong, and its page says so."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import misconv
from misconv import functional
from tests.fuzz import runner
from tests.processes import run_script

ROOT = Path(__file__).parent.parent.parent
# Cases in this process; those that fork have a process of their own, without the threads of a test runner.
HERE = {"maths": 400, "leak": 125, "networks": 100, "calls": 250}
FORKING = {"kills": 12, "files": 100}


@pytest.mark.parametrize("kind", HERE)
def test_random_cases(kind: str, request: pytest.FixtureRequest) -> None:
    tally = runner.run_many(kind, 0, HERE[kind], request.config.getoption("--device"))
    assert tally.cases == HERE[kind]
    assert not tally.failed, runner.summary({kind: tally})


@pytest.mark.parametrize("kind", FORKING)
def test_random_cases_in_processes(kind: str) -> None:
    arguments = (kind, "--cases", str(FORKING[kind]), "--processes", "1")
    # Where torch sees a GPU, backward has threads of its own that no fork survives.
    printed = run_script(ROOT / "tests" / "fuzz" / "__main__.py", *arguments, CUDA_VISIBLE_DEVICES="")
    assert f"{kind}: {FORKING[kind]} cases" in printed


def failures(kind: str, cases: int) -> list[str]:
    return [failure["what"] for failure in runner.run_many(kind, 0, cases).failures]


def test_a_wrong_number_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = functional.expected_conv2d

    def wrong(*args: Any, **kwargs: Any) -> Tensor:
        return right(*args, **kwargs) * 1.001

    monkeypatch.setattr(functional, "expected_conv2d", wrong)
    assert any(what.startswith("E[") for what in failures("maths", 40))


@pytest.fixture
def leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MFA that reads what is hidden."""
    fix = misconv.MFA.fix

    def leaking(self: misconv.MFA, x: Tensor, observed: Tensor) -> misconv.MFA:
        p = fix(self, x, observed)
        p.noise = p.noise + 1e-6 * x.nan_to_num(0, 0, 0).square().mean()
        return p

    monkeypatch.setattr(misconv.MFA, "fix", leaking)


def test_a_leak_is_noticed(leak: None) -> None:
    assert any(what.startswith("layer") for what in failures("leak", 40))


def test_a_raw_error_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def raw(**arguments: Any) -> None:
        torch.zeros(2) @ torch.zeros(3)

    monkeypatch.setattr(misconv, "observe", raw)
    assert any(what.startswith("observe(") for what in failures("calls", 100))


def test_a_network_that_is_converted_wrongly_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = misconv.convert.__globals__["Converted"].forward

    def wrong(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, x if isinstance(x, misconv.MFA) else x + 1e-3, *args, **kwargs)

    monkeypatch.setattr(misconv.convert.__globals__["Converted"], "forward", wrong)
    assert any("complete images differ" in what for what in failures("networks", 30))


def test_the_same_seed_makes_the_same_case() -> None:
    first, second = ([runner.run_case(kind, 11) for kind in HERE] for _ in range(2))
    assert first == second


def test_the_runner_counts_and_keeps_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record.json"
    assert runner.main(["leak", "--cases", "3", "--seed", "5", "--processes", "1", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    tally = record["kinds"]["leak"]
    assert (tally["cases"], tally["first_seed"], tally["last_seed"], tally["failed"]) == (3, 5, 7, 0)
    assert record["versions"]["torch"] == torch.__version__
    assert "leak: 3 cases" in capsys.readouterr().out


def test_a_failure_is_told_with_the_line_that_repeats_it(leak: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["leak", "--cases", "20", "--processes", "1"]) == 1
    assert "FAILED  python -m tests.fuzz leak " in capsys.readouterr().out


def test_the_page_says_what_the_records_say() -> None:
    trust = runpy.run_path(str(ROOT / "tools" / "trust.py"))
    page = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
    assert trust["fill"](page, trust["load"](ROOT / "results" / "fuzz")) == page
    assert set(trust["KINDS"]) == set(runner.KINDS)


def test_records_of_several_runs_are_added_up_once(tmp_path: Path) -> None:
    trust = runpy.run_path(str(ROOT / "tools" / "trust.py"))
    record = runner.record({"leak": runner.run_many("leak", 0, 2)}, "cpu", 1.0)
    (tmp_path / "a.json").write_text(json.dumps(record))
    record["device"] = "NVIDIA H200"
    (tmp_path / "b.json").write_text(json.dumps(record))
    assert "| 4 | 4 | 0 | 0 |" in trust["table_of_kinds"](trust["load"](tmp_path))
    (tmp_path / "c.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="must hold other seeds of leak in every run on NVIDIA H200"):
        trust["load"](tmp_path)
