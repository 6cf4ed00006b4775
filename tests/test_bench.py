"""The benchmark: what it checks, what it writes and how it refuses. No test asks how long anything takes."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

import misconv
from misconv import cli
from misconv._backend import is_plain, plain
from misconv.bench import checks as _bench_check
from misconv.bench import clock as _bench_clock
from misconv.bench import command as bench
from misconv.bench import layer as _bench_layer
from misconv.bench import warm_up as _bench_warm
from misconv.bench.layer import Layer, Setting
from misconv.bench.network import Networks, NetworkSetting

ROOT = Path(__file__).parent.parent
CPU = ("--device", "cpu", "--quick")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["bench", *arguments], prog_name="misconv")


def refused(result: Result, message: str) -> None:
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"misconv: {message}\n")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All sections, tiny, on the CPU."""
    out = tmp_path_factory.mktemp("bench") / "new" / "layer-cpu.json"
    result = call(*CPU, "--seed", "1", "--out", str(out), *(f"--only={name}" for name in bench.SECTIONS))
    assert result.exit_code == 0, result.output
    first, *_, last, file = result.stdout.splitlines()
    assert first == last == bench.QUICK
    assert file == f"Numbers: {out}"
    assert result.stderr == ""
    return out


@pytest.fixture
def facts(record: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    return found


def test_the_record_says_where_it_comes_from(facts: dict[str, Any]) -> None:
    assert facts["versions"]["misconv"] == misconv.__version__
    assert facts["versions"]["torch"] == torch.__version__
    assert {"python", "triton", "cuda", "cudnn"} <= facts["versions"].keys()
    assert facts["device"].startswith("cpu (")
    assert facts["threads"] == torch.get_num_threads()
    assert {"commit", "cores", "load_average", "load_average_after", "seconds"} <= facts.keys()
    assert {"cudnn.allow_tf32", "cuda.matmul.allow_tf32", "cudnn.benchmark"} <= facts["flags"].keys()
    assert (facts["settings"]["seed"], facts["settings"]["quick"]) == (1, True)
    assert (facts["quick"], facts["warning"]) == (True, bench.QUICK)
    assert set(facts["settings"]["bounds"]) == {"ieee", "tf32"}


def test_every_number_has_a_median_and_a_spread(facts: dict[str, Any]) -> None:
    assert facts["sections"].keys() == bench.SECTIONS.keys()
    for rows in facts["sections"].values():
        assert rows
        for row in rows:
            assert len(row["times"]) >= 2
            for taken in row["times"].values():
                low, high = taken["quartiles_us"]
                assert 0 < taken["range_us"][0] <= low <= taken["median_us"] <= high <= taken["range_us"][1]
                assert taken["bursts"] >= 2
                assert taken["calls_per_burst"] >= 1
            for pair, ratio in row["ratios"].items():
                above, below = (row["times"][name]["median_us"] for name in pair.split("/"))
                assert ratio == pytest.approx(above / below, abs=1e-3)


def test_the_sections_hold_what_they_promise(facts: dict[str, Any]) -> None:
    sections = facts["sections"]
    paper = [row["paper"] for row in sections["table10"] if row["kind"] == "forward"]
    assert [(p["size"], p["batch"]) for p in paper] == [(n, b) for n in (28, 32, 64) for b in (16, 32, 64)]
    for name in ("table10", "large", "cpu"):
        for row in sections[name]:
            assert {"misconv/conv", "plain/misconv"} <= row["ratios"].keys()
            assert ("misconv/conv_image" in row["ratios"]) == (row["kind"] == "everything")
        assert {row["kind"] for row in sections[name]} == set(bench.KINDS)
    missing = {0, 0.05, 0.25, 0.5, 0.75, 1}
    assert {row["setting"]["share"] for row in sections["cpu"]} == missing
    seen = {(r["setting"]["share"], r["setting"]["components"], r["setting"]["rank"]) for r in sections["shares"]}
    assert seen == {(share, k, rank) for share in missing for k in (1, 3) for rank in (4, 8)}
    assert {row["varied"] for row in sections["growth"]} == {"size", "batch", "share", "components", "rank"}
    assert sections["nll"][0]["times"].keys() == {"misconv", "plain"}
    for row in sections["network"]:
        assert row["times"].keys() == {"network", "given", "density", "alone"}
        assert row["density"]["gflop_per_image"] > 0
        assert {"network/given", "network/density"} <= row["ratios"].keys()
        assert row["error"] < 1e-4


def test_networks_need_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    refused(
        call(*CPU, "--only", "network"),
        "--only network needs torchvision, from which its networks are: pip install 'misconv[vision]'",
    )
    _, sections = bench.choose("cpu", [], None)
    assert "network" not in sections


@pytest.mark.usefixtures("without_tf32")
def test_a_network_that_says_something_else_of_complete_images_is_not_timed() -> None:
    torch.set_default_dtype(torch.float32)
    networks = Networks(NetworkSetting("resnet18").tiny(), torch.Generator(torch.get_default_device()).manual_seed(0))
    assert networks.check() < 1e-4
    torch.nn.init.normal_(networks.converted.network.fc.weight)
    with pytest.raises(
        bench.WrongResultError, match="resnet18, evaluation, float32, 2×3×32×32: complete images differ"
    ):
        networks.check()


@pytest.mark.parametrize("task", ["evaluation", "training"])
@pytest.mark.parametrize("graph", [False, True])
def test_networks_run_as_a_row_says(task: str, graph: bool) -> None:
    """One step of each; a CUDA graph where there is a GPU."""
    torch.set_default_dtype(torch.float32)
    device = torch.device(torch.get_default_device())
    setting = NetworkSetting("resnet18", task, graph=graph and device.type == "cuda").tiny()  # type: ignore[arg-type]
    networks = Networks(setting, torch.Generator(device).manual_seed(0))
    before = networks.converted.network.fc.weight.detach().clone()
    for contender in networks.contenders(task, setting.graph).values():
        contender.run(0)
    assert torch.equal(networks.converted.network.fc.weight, before) == (task == "evaluation")


def test_output_and_all_gradients_were_checked(facts: dict[str, Any]) -> None:
    checked = {name for row in facts["checks"] if row["what"] == "layer" for name in row["errors"]}
    assert checked == {"output", "weight", "bias", "means", "factors", "noise", "logits"}
    assert {row["what"] for row in facts["checks"]} == {"layer", "log_prob"}
    assert all(error < 1e-5 for row in facts["checks"] for error in row["errors"].values())


def wrong_by_a_percent(*arguments: Any) -> Tensor:
    y = right(*arguments)
    return y if is_plain() else 1.01 * y


def never_finished(*arguments: Any) -> Tensor:
    y = right(*arguments)
    return y if is_plain() else torch.where(torch.arange(y.shape[-1], device=y.device) == 0, math.nan, y)


def without_a_gradient(*arguments: Any) -> Tensor:
    y = right(*arguments)
    return y if is_plain() else y.detach() + 0 * arguments[1].sum() + y.mean() - y.mean().detach()


right = misconv.functional.expected_conv2d


@pytest.mark.parametrize(
    ("path", "what"),
    [(wrong_by_a_percent, "output"), (never_finished, "output"), (without_a_gradient, "weight")],
)
def test_a_wrong_path_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: Any, what: str) -> None:
    def times(*_: Any) -> None:
        raise AssertionError("a wrong path was timed")

    monkeypatch.setattr(misconv.functional, "expected_conv2d", path)
    monkeypatch.setattr(bench, "times", times)
    result = call(*CPU, "--out", str(tmp_path / "new" / "layer.json"))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"misconv: nothing was timed, the fast path is wrong: {what} of layer, 2×1×6×6")
    assert "relative error" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "run", lambda *_, **__: pytest.fail("the benchmark was started"))
    names = "table10, large, norm, shares, growth, nll, network, cpu"
    refused(call("--device", "cpu", "--only", "table11"), f"--only must be one of {names}, got 'table11'")
    refused(call("--device", "tpu"), "--device must be cuda or cpu, got 'tpu'")
    refused(call("--seed", "-1"), "--seed must lie between 0 and 2147483647, got -1")
    refused(call("--device", "cpu", "--out", str(tmp_path)), f"--out must name a file, got the folder {tmp_path}")
    file = tmp_path / "file"
    file.write_text("mine")
    below = call("--device", "cpu", "--out", str(file / "new" / "layer.json"))
    refused(below, f"--out must be below a folder, got {file / 'new'}, but {file} is a file")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = "--device cuda needs a GPU that torch can use, and there is none; --device cpu works anywhere"
    refused(call("--device", "cuda"), message)
    with plain():
        message = "the plain path is forced (MISCONV_PLAIN?): there would be no fast path to compare with it"
        refused(call("--device", "cpu"), message)


def test_it_runs_without_the_packages_of_the_command_line(tmp_path: Path) -> None:
    """A bare machine with a GPU has torch and nothing else: the functions behind the command run there."""
    code = """
import sys
for name in ("typer", "rich", "triton", "lightning_fabric"): sys.modules[name] = None
from pathlib import Path
from misconv.bench import command
out = Path(sys.argv[1])
device, sections = command.choose("cpu", ["nll"], out)
command.write(command.run(device, sections, quick=True, seed=1, keep=command.Keeper(out)), out)
"""
    out = tmp_path / "layer.json"
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False, env=alone)
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text(encoding="utf-8"))["sections"].keys() == {"nll"}


def test_rows_that_need_too_much_memory_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PLAIN_MOST_BYTES", 1e4)
    said: list[str] = []
    run = bench.Bench(torch.Generator("cpu").manual_seed(0), _bench_clock.Pace(0, 1, 1, 0, 1), True, said.append)
    row = run.row(run.layer(Setting()), "weights", bench.EAGER)
    assert row["times"].keys() == {"conv", "misconv"}
    assert row["skipped"] == {"plain": "would allocate about 0 GB"}
    assert "plain skipped" in said[0]


def test_inputs_are_what_the_setting_says() -> None:
    setting = Setting(4, 3, 16, share=1 / 4, components=2, rank=3, per_channel=True)
    layer = Layer(setting, torch.Generator("cpu").manual_seed(0))
    assert len(layer.inputs) == _bench_layer.MOST_SETS
    for x, p in layer.inputs:
        assert p.observed is not None
        assert p.observed.shape == (4, 3, 16, 16)
        assert ((~p.observed).sum((2, 3)) == 64).all()
        assert (p.means == x.unsqueeze(1)).where(p.observed.unsqueeze(1), True).all()
        assert (p.noise > 0).all()
    assert layer.misconv(layer.inputs[0]).shape == setting.output == (4, 32, 16, 16)
    assert not torch.equal(layer.inputs[0].x, layer.inputs[1].x)


def test_precision_is_put_back() -> None:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    for tf32 in (True, False):
        with _bench_check.precision(tf32):
            assert torch.backends.cudnn.allow_tf32 == torch.backends.cuda.matmul.allow_tf32 == tf32
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == before


def test_the_page_is_made_from_the_record(record: Path, tmp_path: Path) -> None:
    page = runpy.run_path(str(ROOT / "tools" / "speed.py"))
    page["main"](["--results", str(record.parent), "--out", str(tmp_path)])
    text = (tmp_path / "speed.md").read_text(encoding="utf-8")
    assert text.startswith("<!-- made by tools/speed.py from layer-cpu.json; do not edit -->\n")
    assert "A quick run on tiny settings" in text
    assert "160 ± 60" in text  # the paper's first number
    for title in ("Is it right?", "The paper's settings", "Large images", "Training a density", "Method"):
        assert f"# {title}\n" in text
    for table in text.split("\n\n"):
        if table.startswith("|"):
            assert len({line.count("|") for line in table.splitlines()}) == 1
    assert (tmp_path / "pictures" / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_needs_a_record(tmp_path: Path) -> None:
    page = runpy.run_path(str(ROOT / "tools" / "speed.py"))
    with pytest.raises(SystemExit, match="no layer-cuda.json or layer-cpu.json in .*; run `misconv bench"):
        page["main"](["--results", str(tmp_path), "--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_stopped_keeps_its_finished_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(bench: bench.Bench) -> Any:
        raise KeyboardInterrupt

    out = tmp_path / "layer.json"
    out.write_text('{"benchmark": "an earlier run"}')
    monkeypatch.setitem(bench.SECTIONS, "growth", stop)
    result = call(*CPU, "--only=nll", "--only=growth", "--out", str(out))
    partial = tmp_path / "layer.partial.json"
    assert (result.exit_code, result.stderr) == (
        130,
        f"misconv: stopped; finished sections (nll) are in {partial}; time the others with --only and another --out\n",
    )
    assert json.loads(out.read_text()) == {"benchmark": "an earlier run"}
    kept = json.loads(partial.read_text(encoding="utf-8"))
    assert list(kept["sections"]) == ["nll"]
    result = call(*CPU, "--only=nll", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["layer.json"]


def test_a_run_that_is_stopped_says_so_when_nothing_is_kept() -> None:
    keep = bench.Keeper(None)
    assert keep.stopped() == "stopped before the first section was finished; nothing is kept"
    keep({"sections": {"nll": []}})
    assert keep.stopped() == "stopped; nothing is kept of nll: name a file with --out to keep finished sections"


@pytest.mark.parametrize("name", ["layer.json", "layer.partial.json"])
@pytest.mark.parametrize("content", ["my notes", '{"mine": 1}', "[1, 2]", "\xff"])
def test_a_file_that_is_not_of_a_benchmark_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str
) -> None:
    (tmp_path / name).write_text(content, encoding="latin-1")
    monkeypatch.setattr(bench, "run", lambda *args, **options: pytest.fail("it was started"))
    result = call(*CPU, "--out", str(tmp_path / "layer.json"))
    assert result.exit_code == 2
    assert re.fullmatch(
        r"misconv: --out must be new or written by this command, got .*; choose another one\n", result.stderr
    )
    assert (tmp_path / name).read_text(encoding="latin-1") == content


def test_a_rehearsal_finds_everything_that_will_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator("cpu")
    sections = ("table10", "large", "shares", "growth", "nll")
    jobs = bench.Rehearsal(generator, _bench_clock.Pace(), False, print).jobs(sections)
    launched: set[tuple[Setting, str]] = set()

    def note(self: bench.Bench, layer: Any, kind: str, names: Any, peak: bool = False, **more: Any) -> dict[str, Any]:
        launched.add((layer, kind))
        return {}

    monkeypatch.setattr(bench.Bench, "layer", lambda self, setting: setting)
    monkeypatch.setattr(bench.Bench, "row", note)
    run = bench.Bench(generator, _bench_clock.Pace(), False, print)
    for section in sections[:-1]:
        list(bench.SECTIONS[section](run))
    planned = {(job.setting, kind) for job in jobs for kind in job.kinds}
    assert {(_bench_layer.replace(setting, share=Setting.share), kind) for setting, kind in launched} == planned
    assert len(jobs) == len({job.setting for job in jobs})


def test_launching_ahead_says_what_went_wrong_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Setting(2, 1, 8, filters=2)
    assert _bench_warm.launch(_bench_warm.Job(tiny, ("forward", "weights", "everything"), "ieee"), "cpu") == ""

    def fail(*arguments: Any) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(_bench_warm, "rehearse", fail)
    assert _bench_warm.launch(_bench_warm.checks([tiny])[0], "cpu") == "RuntimeError: no such luck"
