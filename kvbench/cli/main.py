"""`python -m kvbench method=h2o budget=1000`: the command line. Imports no torch until there is something to run."""

import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from kvbench.cli.help_text import help_text
from kvbench.cli.status import describe
from kvbench.cli.words import check_words, sweep_words, without_pack
from kvbench.config import ConfigSources, chosen_measures, method_configs, take_sources
from kvbench.config.composing import ROOT
from kvbench.config.error_lines import check_root, one_line
from kvbench.config.sources import BUILT_IN, PACKAGE
from kvbench.errors import EXIT_SOME_FAILED, EXIT_USER_ERROR, UserError
from kvbench.sweep.plan import check_hydra_folders, job_of, launcher_of, plan_sweep
from kvbench.sweep.plan_files import LAUNCHER, Sweep, job_record
from kvbench.sweep.signals import Terminated
from kvbench.sweep.survey import survey
from kvbench.sweep.watch import until_idle, wait_for_jobs

EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 130, 143


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 all measured, 1 a fault, 2 unusable input, 3 some cells failed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    codes: list[int] = []
    sources = BUILT_IN
    try:
        sources, words = take_sources(arguments)
        if any(word in ("-h", "--help", "help", "--hydra-help") for word in words):
            print(help_text(sources))
            return 0
        words = check_words(words, sources)
        check_hydra_folders(words)
        if "-m" in words or "--multirun" in words:
            return run_sweep(words, sources)
        if launcher := launcher_of(words):
            raise UserError(f"hydra/launcher={launcher} launches the jobs of a sweep; type -m before the settings")
        run_hydra(without_pack(words), sources, codes)
    except (UserError, HydraException, OmegaConfBaseException) as error:
        print(f"kvbench: {one_line(error, sources)}", file=sys.stderr)
        return EXIT_USER_ERROR
    except Terminated:
        return EXIT_TERMINATED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return max(codes, default=0)


def run_sweep(arguments: list[str], sources: ConfigSources) -> int:
    """Plan the sweep and run it; the run folders, not the launcher, tell what became of each job."""
    words, launcher = sweep_words(arguments, sources), launcher_of(arguments)
    codes: list[int] = []
    with scratch_folder() as scratch:
        if any(word.split("=")[0] in ("-c", "--cfg", "-i", "--info") for word in words):
            run_hydra(words, sources, codes)
            return 0
        sweep = plan_sweep(words, sources, ["python", *sys.orig_argv[1:]])
        if not any(word.startswith("hydra.sweep.dir=") for word in words):
            words.append(f"hydra.sweep.dir='{sweep.folder / LAUNCHER if launcher else scratch}'")
        print(f"sweep: {sweep.folder}\nprogress: python -m kvbench.status {shlex.quote(str(sweep.folder))}", flush=True)
        try:
            with until_idle(sweep) if launcher else nullcontext():
                run_hydra(words, sources, codes, sweep)
        except (UserError, HydraException, OmegaConfBaseException):
            raise
        except Exception as error:  # a launcher may give up at the first job that was killed, while others go on
            reason = f"{type(error).__name__}: {one_line(error, sources)[:200]}"
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


@contextmanager
def scratch_folder() -> Iterator[str]:
    """A temporary folder for what Hydra writes. Raises UserError where none can be made."""
    try:
        made = tempfile.TemporaryDirectory()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(
            f"no temporary folder can be made ({reason}); make room in it, or set TMPDIR to another folder"
        ) from error
    with made as folder:
        yield folder


def run_hydra(words: list[str], sources: ConfigSources, codes: list[int], sweep: Sweep | None = None) -> None:
    """Compose the config and run each job; `codes` collects the exit code of each job in this process.

    A job raises nothing but an interrupt: an error of one job must not end a sweep, and Hydra would print its own
    lines around it.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sources.register()

    @hydra.main(version_base="1.3", config_path=f"pkg://{PACKAGE}", config_name=ROOT)
    def task(config: DictConfig) -> None:
        given = HydraConfig.get().overrides.task
        with job_record(sweep, given) as outcome:
            try:
                outcome["code"] = run_task(config, [*sources.words, *given], sweep)
            except (UserError, HydraException, OmegaConfBaseException) as error:
                outcome |= {"code": EXIT_USER_ERROR, "error": one_line(error, sources)}
                print(f"kvbench: {outcome['error']}", file=sys.stderr)
            except Exception:
                outcome |= {"code": EXIT_FAILED, "error": traceback.format_exc()}
                print(outcome["error"], file=sys.stderr)
            codes.append(outcome["code"])

    before = sys.argv
    sys.argv = ["kvbench", *sources.spelled(words), *sources.words]
    try:
        task()
    finally:
        sys.argv = before


def run_task(config: DictConfig, overrides: list[str], sweep: Sweep | None) -> int:
    """One job: its methods and measures are checked first, then torch is imported and everything runs.

    overrides: of the job, with `hydra.searchpath=` among them where configs come from outside.
    """
    sources = ConfigSources.of(overrides)
    check_root(config, sources)
    chosen_measures(config)
    job, methods = job_of(config, sweep), method_configs(config, overrides)
    from kvbench.run import run

    return run(config, methods, job)
