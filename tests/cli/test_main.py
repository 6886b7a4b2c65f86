"""The command line: bad input gets one line and exit code 2, leaves nothing behind, and mostly needs no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kvbench import run
from kvbench.cli.help_text import SWITCHES, help_text
from kvbench.cli.main import main
from kvbench.cli.words import check_words
from kvbench.config import GROUPS, KNOBS, OTHER_KNOBS
from kvbench.config.error_lines import unknown_key
from kvbench.config.sources import BUILT_IN
from kvbench.errors import UserError
from kvbench.results.loading import find_runs, load
from kvbench.results.run_files import read_status
from tests.shared.paths import ROOT
from tests.shared.text import light

QUICK = ["model=random-tiny", "data=random", "measure=[perplexity]", "perplexity.context=32", "perplexity.tokens=2"]
TINY = [
    "model=random-tiny",
    "data=random",
    "measure=[memory]",
    "memory.contexts=[32]",
    "memory.tokens=2",
    "memory.isolate=false",
]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder, and nothing fetched: a bad word that is let through must not start a long run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVBENCH_CACHE", "/nothing/fetched")
    with light():
        yield tmp_path


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a refused command prints. Fails unless that is all it does."""
    code = main(words)
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert (code, output.out, len(lines)) == (2, "", 1), output
    assert lines[0].startswith("kvbench: ")
    assert sorted(Path.cwd().rglob("*")) == []
    return lines[0].removeprefix("kvbench: ")


# Words beside TINY, and what the line must say: what was given and what to type.
BAD = [
    # names
    (["method=h20"], "method=h20 is unknown (did you mean h2o?); choose from "),
    (["method=H2O"], "did you mean h2o?"),
    (["store=int3"], "store=int3 is unknown (did you mean int"),
    (["model=smollm"], "model=smollm is unknown (did you mean smollm2-135m?)"),
    (["data=essay"], "did you mean essays?"),
    (["method=adakv", "inner=foo", "budget=16"], "inner=foo is no method; type inner=snapkv"),
    (["store=paged", "inner=h2o"], "inner=h2o is no store; type inner=int4"),
    (["experiment=first"], "did you mean first_light"),
    (["budgt=16"], "budgt is no setting (did you mean budget?)"),
    (["+budgt=16"], "budgt is no setting (did you mean budget?)"),
    (["perplexity.contxt=16"], "did you mean perplexity.context?"),
    (["memory.foo=16"], "choose from memory.contexts, memory.tokens"),
    (["model.pth=x"], "did you mean model.path?"),
    (["model.load_kwargs.foo=1"], "type +model.load_kwargs.foo=VALUE"),
    (["measure=[memry]"], "measure=memry is unknown (did you mean memory?)"),
    (["measure=[]"], "measure=[] measures nothing; choose from error"),
    (["method=gqa"], "model=smollm2-135m"),
    (["method=mqa"], "type model=gemma3-270m"),
    (["method=mla"], "type model="),
    (["compare=[full,mla]"], "type model="),
    (["method=null"], "method=null names nothing; choose from "),
    (["store="], "store= names nothing; choose from "),
    # budgets
    (["method=h2o"], "H2O needs a budget: type budget=256"),
    *(
        (["method=h2o", f"budget={b}"], f"budget={b} is not a budget; type a whole number of tokens (budget=256)")
        for b in ("0", "-3", "1.0", "1.5", "0.0", "-0.5", "25%", "many", "nan")
    ),
    (["method=h2o", "budget=true"], "budget=True is not a budget"),
    (["budget=0"], "budget=0 is not a budget"),  # nothing reads it, and it is refused all the same
    (["method=h2o", "budget=1"], "below the 2 tokens"),
    (["method=h2o", "budget=16", "window=16"], "type budget=17 or more"),
    (["method=streaming_llm", "budget=4"], "4 sinks and the newest token); type budget=5 or more"),
    (["method=streaming_llm", "budget=0.1"], "budget=0.1 of a 32-token prompt is 4 tokens, below the 5"),
    (["method=random", "budget=1"], "type budget=6 or more"),
    # other knobs
    (["method=kivi", "bits=3"], "bits=3 for KIVI; type bits=8, bits=4 or bits=2"),
    (["method=kivi4", "bits=3"], "bits=3 contradicts kivi4"),
    (["method=kivi4", "k_bits=2"], "k_bits=2 contradicts kivi4"),
    (["store=int4", "bits=8"], "bits=8 contradicts int4"),
    (["method=kivi", "residual=100"], "residual=100 is not a multiple of group=32; type residual=128"),
    (["method=kivi", "residual=0"], "residual=0 is not a multiple"),
    (["method=kivi", "group=24", "residual=24"], "group=24 does not divide the head size 32; type one of: group=8"),
    (["store=int4", "group=24"], "group=24 does not divide the head size 32"),
    (["method=kivi", "group=1"], "type a multiple of 8"),
    (["method=kivi", "group=large"], "group=large"),
    (["method=h2o", "budget=16", "variant=max_pool"], "variant=max_pool for H2O; type variant=sum or max"),
    (["method=streaming_llm", "budget=16", "sinks=-1"], "sinks=-1"),
    (["method=h2o", "budget=16", "window=0"], "window=0"),
    (["+method.rule.foo=1"], "unexpected keyword argument 'foo'"),
    # combinations
    (["method=h2o", "budget=16", "store=kivi4"], "can only append; choose a store with single slots"),
    (["method=kivi4", "store=dense"], "method=kivi4 brings its own store (kivi4); leave store=dense away"),
    (["method=recompute", "store=int4"], "brings its own store"),
    (["compare=[h2o]", "store=int4", "budget=16"], "write h2o+int4 in the list"),
    (["compare=[full]", "method=h2o", "budget=16"], "put the method into the list"),
    # lists and quotes
    (["method=full,h2o"], "type compare='[full,h2o]' to compare them, or -m method=full,h2o"),
    (["method=[full,h2o]"], "type compare='[full,h2o]' to compare them, or -m method=full,h2o"),
    (["budget=16,32"], "type -m budget=16,32 to run one after another"),
    (["measure=memory,latency"], "type measure='[memory,latency]'"),
    (["compare=full,h2o"], "type compare='[full,h2o]'"),
    (["compare=[full,h2o"], "quote brackets and spaces: compare='[full,h2o]'"),
    (["compare=[method=h2o budget=16]"], "quote brackets and spaces"),
    (["compare=[]"], "compare=[] lists no methods; type compare='[full,h2o,h2o+int4]'"),
    (["compare={full: 1}"], "lists no methods"),
    (["compare=[h2o+]", "budget=16"], "compare entry 'h2o+' is not METHOD, METHOD+STORE"),
    (["compare=[h2o+]", "budget=16"], "type compare='[full,h2o,h2o+int4]'"),
    (["method=h2o+int4", "budget=16"], "type method=h2o store=int4, or compare='[h2o+int4]'"),
    (['compare=["method=h2o method=snapkv"]', "budget=16"], "gives method twice; type an entry for each"),
    (['compare=["method=h2o budget=8 budget=9"]'], "gives budget twice"),
    (['compare=["methd=h2o"]'], "sets methd (did you mean method?)"),
    (['compare=["method=h2o bugdet=8"]'], "sets bugdet (did you mean budget?)"),
    (["method=adakv", "inner=[snapkv]", "budget=40"], "inner=['snapkv'] is no method; type inner=snapkv"),
    (["store=paged", "inner=5"], "inner=5 is no store; type inner=int4"),
    (["store=lowrank", "rank=[0.5]"], "rank=[0.5] for lowrank; type a share above 0"),
    (["store=lowrank", "energy={a: 1}"], "energy={'a': 1} for lowrank; type a share above 0"),
    (["method=pyramid", "budget=40", "beta=0"], "beta=0 for Pyramid; type a whole number"),
    (["method=pyramid", "budget=40", "+method.rule.beta=[20]"], "beta=[20] for Pyramid"),
    (["store=rot4", "store.slots.rotate=3"], "rotate=3 for this store; type true"),
    (["method=hf_fp8", "store.slots.backend=foo"], "backend=foo is none of transformers' caches; type quanto"),
    (["method=kvzip", "budget=16", "decode=evict"], "decode=evict for KVzip; type decode=append"),
    (["compare=[h2o,critical]", "budget=300", "decode=evict"], "decode=evict for Critical; type decode=append"),
    (["method=adakv", "inner=critical", "budget=50", "decode=evict"], "decode=evict for Critical; type decode=append"),
    (["method=adakv", "inner=keydiff", "budget=16", "decode=evict"], "AdaKV with KeyDiff and decode=evict"),
    (["method=r_kv", "budget=16", "mix_lambda=2"], "mix_lambda=2 for RKV; type a number from 0 to 1"),
    (["method=r_kv", "budget=8"], "below the 9 tokens that RKV always keeps"),
    (["compare=[full,h20]"], "did you mean h2o?"),
    (["compare=[full+int5]"], "store=int5 is unknown"),
    (['compare=["budget=16"]'], "write 'method=h2o budget=16'"),
    (['compare=["method=h2o budgt=16"]'], "sets budgt (did you mean budget?); an entry takes method, store"),
    (['compare=["method=h2o budget=16 measure=[needle]"]'], "sets measure; an entry takes"),
    (['compare=["method=full,h2o"]', "budget=16"], "gives several values"),
    # words that are no settings
    (["h2o"], "'h2o' is not KEY=VALUE; type method=h2o"),
    (["random-tiny"], "type model=random-tiny"),
    (["report"], "type python -m kvbench.report"),
    (["=h2o"], "'=h2o' is not KEY=VALUE"),
    (["--budget=16"], "--budget=16 is no option"),
    (["-x"], "-x is no option"),
    (["--cfg"], "followed by one of job, hydra, all"),
    (["--cfg", "jobs"], "'--cfg jobs' is unknown"),
    (["~budget"], "settings cannot be taken away"),
    # measures
    (["measure=[needle]"], "needle needs words and random-tiny has random weights"),
    (["memory.contexts=[]"], "memory.contexts=[] lists nothing"),
    (["memory.contexts=[0]"], "memory.contexts=0 is not a whole number of at least 1"),
    (["memory.contexts=[32,1.5]"], "memory.contexts=1.5 is not a whole number"),
    (["memory.tokens=0"], "memory.tokens=0"),
    (["measure=[latency]", "latency.warmup=-1"], "latency.warmup=-1 is not a whole number of at least 0"),
    (["measure=[needle]", "needle.depths=[1.5]"], "needle.depths=1.5 is not a number from 0 to 1"),
    (["measure=[needle]", "needle.question=during"], "type needle.question=after or needle.question=before"),
    (["memory=16"], "memory=16 is not a group of settings; type memory.KEY=VALUE"),
    # lengths
    (["memory.contexts=[9000]"], "needs 9002 positions and random-tiny has 8192; type a smaller memory.contexts"),
    (["memory.contexts=[90]", "data.random_tokens=91"], "needs 92 tokens and data=random has 91"),
    (["measure=[perplexity]", "data.random_tokens=3000"], "needs 3200 tokens and data=random has 3000"),
    (["measure=[latency]", "latency.contexts=[8150]"], "needs 8206 positions"),
    (
        [
            "measure=[perplexity]",
            "perplexity.context=60",
            "perplexity.tokens=20",
            "perplexity.windows=9",
            "data.random_tokens=200",
        ],
        "twice; type perplexity.windows=7 or fewer",
    ),
    # switches
    (["threads=0"], "threads=0 is not a whole number from 1 to "),
    (["threads=100000"], "threads=100000 is not"),
    (["threads=two"], "threads=two"),
    (["seed=-1"], "seed=-1 is not a whole number from 0 to 4294967295"),
    (["seed=4294967296"], "seed=4294967296 is not"),
    (["seed=null"], "is not a whole number"),
    (["kernel=fast"], "kernel=fast is unknown; choose from auto, reference, cpu"),
    (["save_tokens=yes"], "save_tokens"),
    (["save_kept=3"], "save_kept"),
    (["results_dir="], "is no folder; type results_dir=results"),
    (["results_dir=null"], "is no folder"),
    (["results_dir=/proc/results"], "results folder '/proc/results' cannot be written"),
    (["results_dir=/etc/hostname/results"], "is a file"),
    # models and texts
    (["model=hub"], "no model is named: write model.id="),
    (["model=hub", "model.path=/nowhere"], "model.path=/nowhere does not exist"),
    (["model=smollm2-135m"], "type python -m kvbench.fetch smollm2-135m"),
    (["data=essays"], "type python -m kvbench.fetch essays"),
    (["data=essays", "data.path=/nowhere"], "data.path=/nowhere does not exist"),
    (["data=essays", "data.path=a=b.txt"], "other signs twice: data.path='\"a=b.txt\"'"),
    (["data=essays", 'data.path="a=b.txt"'], "data.path=a=b.txt does not exist"),
    (["data=essays", "data.path=~/nowhere"], f"data.path={Path.home()}/nowhere does not exist"),
    (["experiment=null"], "experiment=null names nothing"),
    # values of another kind
    (["model=3"], "model=3 is unknown; choose from deepseek-v2-lite"),
    (["method=3"], "method=3 is unknown; choose from adakv"),
    (["store=2"], "store=2 is unknown"),
    (["data=1"], "data=1 is unknown; choose from bible, code, essays"),
    (["experiment=3"], "experiment=3 is unknown; choose from architecture"),
    (["compare=['method=3']"], "method=3 is unknown; choose from adakv"),
    (["model={a: 1}"], "model={a: 1} is no name; choose from deepseek-v2-lite"),
    (["hydra=3"], "hydra=3: Hydra's settings are set one by one"),
    (["hydra.run.dir=/proc/x"], "hydra.run.dir '/proc/x' cannot be written"),
    (["method.rule=null"], "method.rule=None names no class; leave method.rule away"),
    (["store.slots=3"], "store.slots=3 names no class"),
    (["method.name=null"], "is no config with a name; type method=NAME"),
    (["measure={a: 1}"], "measure={a: 1} is not a list; type measure='[error]'"),
    (["measure=[{a: 1}]"], "measure={'a': 1} is unknown; choose from error"),
    (["method.rule=[1]"], "method.rule"),
    (["memory.tokens=99999999999999999999"], "memory.tokens=99999999999999999999 does not fit into 64 bits"),
    (["memory.contexts=[32,-99999999999999999999]"], "memory.contexts=-99999999999999999999 does not fit into 64 bits"),
    (["compare=['method=h2o budget=99999999999999999999']"], "compare=99999999999999999999 does not fit"),
    (["model.dtype=int8"], "model.dtype=int8 is not known"),
    (["model.random.num_attention_heads=5"], "not a multiple of the number of attention heads"),
]


@pytest.mark.parametrize(("words", "says"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_input_is_one_line_and_leaves_nothing(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {word.split("=")[0] for word in words}
    line = refused([*(word for word in TINY if word.split("=")[0] not in given), *words], capsys)
    assert says in line


def test_a_truncated_gguf(tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("token_embd.weight", np.zeros((256, 128), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.write_bytes(path.read_bytes()[:20_000])
    line = refused(["model=hub", f"model.path={path}", *TINY[1:]], capsys)
    assert "model.gguf is a truncated or damaged GGUF file" in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-m", "method=full,h20"], "method=h20 is unknown (did you mean h2o?)"),
        (["-m", "method=full", "budgt=1,2"], "budgt is no setting (did you mean budget?)"),
        (["-m", "method=full,h2o", "budget=16", "sweep.pack=some"], "type sweep.pack=methods or sweep.pack=none"),
        (["-m", "method=full", "results_dir=/proc/results"], "cannot be written"),
    ],
)
def test_a_sweep_of_something_unknown_begins_nothing(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused([*TINY, *words], capsys)


def test_help_names_every_choice_and_needs_no_config(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["-h"], ["help"], ["method=h2o", "--help"]):
        assert main(words) == 0
        assert capsys.readouterr().out.rstrip() == help_text(BUILT_IN)
    listed = {
        line.split()[0]: line.split(maxsplit=1)[1] for line in help_text(BUILT_IN).splitlines() if line.startswith("  ")
    }
    for group in ("method", "store", "measures", "model", "data", "experiment"):
        assert BUILT_IN.names(group)
        for name, line in BUILT_IN.names(group).items():
            assert line, f"{group}/{name}.yaml begins with no comment"
            assert listed[name]
    for knob in (*KNOBS, *OTHER_KNOBS, *SWITCHES):
        assert listed[knob], f"{knob} has no comment in config.yaml"
    assert sorted(Path.cwd().rglob("*")) == []


def test_cfg_shows_the_settings_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--cfg", "job"], ["--cfg=job"], ["-c", "job"], ["--cfg", "job", "--resolve"]):
        assert main([*TINY, "method=h2o", "budget=16", *words]) == 0
        shown = capsys.readouterr().out
        assert "budget: 16" in shown
        assert "kvbench.methods.h2o.H2O" in shown
    assert sorted(Path.cwd().rglob("*")) == []


def test_a_key_whose_default_is_an_empty_mapping_takes_any_mapping(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "model.load_kwargs={device_map: auto}", "--cfg", "job"]) == 0
    assert "load_kwargs:\n    device_map: auto\n" in capsys.readouterr().out
    assert main(["model=hub", "model.random={model_type: llama}", "--cfg", "job"]) == 0
    assert "random:\n    model_type: llama\n" in capsys.readouterr().out
    slurm = "hydra.launcher.additional_parameters={mail-type: END}"
    assert BUILT_IN.spelled([slurm, "memory={contexts: [3]}"]) == [f"++{slurm}", "memory={contexts: [3]}"]


def test_flags_and_their_values_are_told_apart() -> None:
    check_words(["-m", "method=h2o", "--cfg", "job", "--resolve", "--info", "plugins", "hydra.verbose=true"], BUILT_IN)
    for words in (["--resolve", "job"], ["-m", "h2o"], ["--info", "method=h2o"], ["method=h2o", "-c"]):
        with pytest.raises(UserError):
            check_words(words, BUILT_IN)


def test_unknown_keys_are_answered_with_keys_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Each key that the line offers is accepted by the config."""
    for key in ("foo", "needle.foo", "model.foo", "data.foo"):
        offered = unknown_key(key).split("choose from ")[1].split(", ")
        assert len(offered) >= 4
        settable = [f"{k}=null" for k in offered if k not in (*GROUPS, "experiment")]
        assert main(["model=hub", *settable, "--cfg", "job"]) == 0
        capsys.readouterr()


def program(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, env=environment)


def test_bad_words_import_no_torch() -> None:
    """`--help`, a bad name or key, a contradiction: answered before anything slow is imported."""
    calls = [
        ["--help"],
        ["h2o"],
        ["method=h20"],
        ["foo=1"],
        ["perplexity.foo=1"],
        ["measure=[foo]"],
        ["method=gqa"],
        ["method=kivi4", "bits=3"],
        ["method=kivi4", "store=dense"],
        ["compare=[full,h2o+int5]"],
        ["compare=[h2o]", "store=int4"],
        ["--cfg", "jobs"],
        ["-m", "method=full,h20"],
        ["method=h2o", "--cfg", "job"],
    ]
    code = (
        "import sys; from kvbench.cli.main import main\n"
        f"codes = [main(words) for words in {calls!r}]\n"
        "print(codes, [name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    done = program("-c", code)
    assert done.stdout.splitlines()[-1] == f"{[0, *[2] * 12, 0]} []", done.stderr
    assert len(done.stderr.splitlines()) == 12
    assert sorted(Path.cwd().rglob("*")) == []


def test_as_a_program() -> None:
    done = program("-m", "kvbench", "h2o")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvbench: 'h2o' is not KEY=VALUE; type method=h2o, for example\n"


# sweeps


def run_folders() -> list[Path]:
    outside = [path for path in Path.cwd().iterdir() if path.name != "results"]
    assert outside == []
    return find_runs("results")


def test_a_sweep_over_budgets_makes_a_run_folder_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK[:2], "-m", *QUICK[2:], "method=h2o", "budget=8,16"]) == 0
    assert capsys.readouterr().out.count("run folder: ") == 2
    budgets = [set(load(folder)["budget"].dropna()) for folder in run_folders()]
    assert sorted(budgets, key=min) == [{8.0}, {16.0}]


def test_methods_of_a_sweep_share_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "-m", "method=full,h2o,kivi4", "budget=8"]) == 0
    (folder,) = run_folders()
    assert set(load(folder)["method"]) == {"full", "h2o", "kivi4"}


def test_methods_of_a_sweep_run_alone_if_told_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "-m", "method=h2o,random", "budget=8", "sweep.pack=none"]) == 0
    others = [set(load(folder)["method"]) - {"full"} for folder in run_folders()]
    assert sorted(others, key=min) == [{"h2o"}, {"random"}]


def test_one_bad_job_does_not_end_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    code = main([*QUICK, "-m", "method=h2o", "budget=8,0,16"])
    errors = capsys.readouterr().err
    assert code != 0
    assert "budget=0 is not a budget" in errors
    budgets = {budget for folder in run_folders() for budget in load(folder)["budget"].dropna()}
    assert budgets == {8.0, 16.0}
    assert [read_status(folder)["status"] for folder in run_folders()] == ["ok", "ok"]


def test_a_fault_in_one_job_does_not_end_a_sweep(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not an unusable word but an error of the harness itself: a traceback, and the next job."""
    plain = run.load_model
    loads: list[str] = []

    def load(spec: Any) -> Any:
        loads.append(spec.name)
        if len(loads) == 1:
            raise ZeroDivisionError("a fault")
        return plain(spec)

    monkeypatch.setattr(run, "load_model", load)
    assert main([*QUICK, "-m", "method=h2o", "budget=8,16"]) != 0
    assert "ZeroDivisionError: a fault" in capsys.readouterr().err
    assert len(run_folders()) == 1


@pytest.mark.parametrize("words", [["kvbench", "--help"], ["kvbench.status", "results"], ["kvbench.plan", "--help"]])
def test_a_reader_that_has_gone_is_no_fault(words: list[str]) -> None:
    """As `| head` does it."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", *words]
    root = ROOT
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, cwd=root, text=True, check=False)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, "")
