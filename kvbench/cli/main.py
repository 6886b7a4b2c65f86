"""`python -m kvbench method=h2o budget=1000`: the command line. Imports no torch until there is something to run."""

import os
import shlex
import sys
import tempfile
import traceback
from contextlib import nullcontext

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from kvbench.cli.messages import help_text, names, one_line, root_settings, several, unknown_key
from kvbench.cli.status import describe
from kvbench.config import GROUPS, check_measures, method_configs
from kvbench.errors import EXIT_SOME_FAILED, EXIT_USER_ERROR, UserError
from kvbench.sweep.plan import check_hydra_folders, is_setting, job_of, launcher_of, plan_sweep
from kvbench.sweep.plan_files import LAUNCHER, Sweep, job_record
from kvbench.sweep.signals import Terminated
from kvbench.sweep.survey import survey
from kvbench.sweep.watch import until_idle, wait_for_jobs

INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
FLAGS = {
    "-m": (),
    "--multirun": (),
    "--resolve": (),
    "-c": ("job", "hydra", "all"),
    "--cfg": ("job", "hydra", "all"),
    "-i": INFO,
    "--info": INFO,
}
"""Hydra's flags that mean something here, and the values they take."""

PACKS = ("methods", "none")

EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 130, 143


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 all measured, 1 a fault, 2 unusable input, 3 some cells failed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if any(word in ("-h", "--help", "help", "--hydra-help") for word in arguments):
        print(help_text())
        return 0
    codes: list[int] = []
    try:
        arguments = check_words(arguments)
        check_hydra_folders(arguments)
        if "-m" in arguments or "--multirun" in arguments:
            return run_sweep(arguments)
        if launcher := launcher_of(arguments):
            raise UserError(f"hydra/launcher={launcher} launches the jobs of a sweep; type -m before the settings")
        run_hydra(without_pack(arguments), codes)
    except (UserError, HydraException, OmegaConfBaseException) as error:
        print(f"kvbench: {one_line(error)}", file=sys.stderr)
        return EXIT_USER_ERROR
    except Terminated:
        return EXIT_TERMINATED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return max(codes, default=0)


def run_sweep(arguments: list[str]) -> int:
    """Plan the sweep, run it, and tell from the run folders, not from the launcher, what became of it."""
    words, launcher = sweep_words(arguments), launcher_of(arguments)
    codes: list[int] = []
    with tempfile.TemporaryDirectory() as scratch:
        if any(word.split("=")[0] in ("-c", "--cfg", "-i", "--info") for word in words):
            run_hydra(words, codes)
            return 0
        sweep = plan_sweep(words, ["python", *sys.orig_argv[1:]])
        if not any(word.startswith("hydra.sweep.dir=") for word in words):
            words.append(f"hydra.sweep.dir='{sweep.folder / LAUNCHER if launcher else scratch}'")
        print(f"sweep: {sweep.folder}\nprogress: python -m kvbench.status {shlex.quote(str(sweep.folder))}", flush=True)
        try:
            with until_idle(sweep) if launcher else nullcontext():
                run_hydra(words, codes, sweep)
        except (UserError, HydraException, OmegaConfBaseException):
            raise
        except Exception as error:  # a launcher may give up at the first job that was killed, while others go on
            reason = f"{type(error).__name__}: {one_line(error)[:200]}"
            print(f"kvbench: the launcher ended early ({reason})", file=sys.stderr)
            wait_for_jobs(sweep)
        except KeyboardInterrupt:
            if launcher == "slurm":
                print("kvbench: stopped waiting; jobs that were sent go on until they are cancelled", file=sys.stderr)
            raise
    found = survey(sweep.folder)
    if launcher and (rows := found.rows()):
        from rich.console import Console

        from kvbench.report.tables.measure_tables import TerminalTable
        from kvbench.results.loading import find_runs
        from kvbench.results.recorded_config import read_config, recorded_headlines

        Console().print(TerminalTable(rows, recorded_headlines(map(read_config, find_runs(sweep.folder)))))
    print(describe(found))
    print(f"report: python -m kvbench.report {shlex.quote(str(sweep.folder))}")
    return EXIT_SOME_FAILED if not found.complete else EXIT_USER_ERROR if found.refused else 0


def run_hydra(words: list[str], codes: list[int], sweep: Sweep | None = None) -> None:
    """Compose the config and run each job; `codes` collects what each came to in this process.

    A job raises nothing but an interrupt: whatever ends it must not end a sweep, and Hydra would print its own lines
    around the error.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"

    @hydra.main(version_base="1.3", config_path="pkg://kvbench.conf", config_name="config")
    def task(config: DictConfig) -> None:
        given = HydraConfig.get().overrides
        searched = [word for word in given.hydra if is_setting(word)]
        with job_record(sweep, given.task) as outcome:
            try:
                outcome["code"] = run_task(config, [*searched, *given.task], sweep)
            except (UserError, HydraException, OmegaConfBaseException) as error:
                outcome |= {"code": EXIT_USER_ERROR, "error": one_line(error)}
                print(f"kvbench: {outcome['error']}", file=sys.stderr)
            except Exception:
                outcome |= {"code": EXIT_FAILED, "error": traceback.format_exc()}
                print(outcome["error"], file=sys.stderr)
            codes.append(outcome["code"])

    before = sys.argv
    sys.argv = ["kvbench", *words]
    try:
        task()
    finally:
        sys.argv = before


def run_task(config: DictConfig, overrides: list[str], sweep: Sweep | None) -> int:
    """One job: its methods and measures are checked first, then torch is imported and everything runs."""
    added = sorted(set(config) - set(root_settings()))
    if added:
        raise UserError(unknown_key(str(added[0])))
    check_measures(config.measure)
    job, methods = job_of(config, sweep), method_configs(config, overrides)
    from kvbench.run import run

    return run(config, methods, job)


def check_words(arguments: list[str]) -> list[str]:
    """The words, flags first: Hydra reads no flag between settings.

    Raises UserError where a word is neither a flag of `FLAGS`, with its value, nor a usable KEY=VALUE.
    """
    flags: list[str] = []
    settings: list[str] = []
    words = iter(arguments)
    for word in words:
        if word.startswith("~"):
            raise UserError(f"{word}: settings cannot be taken away; leave it out, for the default")
        if not word.startswith("-"):
            check_override(word)
            key, _, value = word.partition("=")
            settings.append(f"{key}={os.path.expanduser(value)}")  # no shell does it after a key with a dot
            continue
        flag, _, value = word.partition("=")
        if flag not in FLAGS:
            raise UserError(f"{word} is no option; type python -m kvbench --help, or KEY=VALUE such as method=h2o")
        choices = FLAGS[flag]
        given = value or (next(words, "") if choices else "")
        if choices and given not in choices:
            given = f"{flag} {given}".strip()
            raise UserError(f"'{given}' is unknown; type {flag} followed by one of {', '.join(choices)}")
        flags += [flag, given] if choices else [flag]
    return [*flags, *settings]


def check_override(word: str) -> None:
    """Raise UserError for a word that Hydra would answer with something that helps nobody."""
    key, equals, value = word.partition("=")
    if not equals or not key:
        advice = next((f"{group}={word}" for group in ("method", "model") if word in names(group)), "method=h2o")
        if word in ("fetch", "report", "plan", "check", "status", "harness"):
            advice = f"python -m kvbench.{word}"
        raise UserError(f"'{word}' is not KEY=VALUE; type {advice}, for example")
    if key in (*GROUPS, "experiment") and value.strip("'\"") in ("", "null"):
        raise UserError(f"{word} names nothing; choose from {', '.join(names(key))}")
    if key in GROUPS and value.startswith("["):
        raise UserError(f"{word} is a list, and {key} takes one name; {several(key, value.strip('[]'))}")
    if key == "sweep.pack" and value not in PACKS:
        raise UserError(f"{word} is unknown; type {' or '.join(f'sweep.pack={choice}' for choice in PACKS)}")


def sweep_words(words: list[str]) -> list[str]:
    """The words under -m: `method=a,b,c` becomes `compare=[a,b,c]`, so that the methods share a job and its prefills.

    sweep.pack=none leaves it alone.
    """
    kept = without_pack(words)
    if "sweep.pack=none" in words or any(word.startswith(("compare=", "store=")) for word in words):
        return kept
    packed = []
    for word in kept:
        methods = word.removeprefix("method=").split(",")
        is_list = word.startswith("method=") and len(methods) > 1 and all(m in names("method") for m in methods)
        packed.append(f"compare=[{','.join(methods)}]" if is_list else word)
    return packed


def without_pack(words: list[str]) -> list[str]:
    """The words that are Hydra's business: `sweep.pack` is decided before it sees any."""
    return [word for word in words if not word.startswith("sweep.pack=")]
