"""`python -m kvbench method=h2o budget=1000`: the command line. Imports no torch until there is something to run."""

import os
import sys
import tempfile
import traceback
from contextlib import nullcontext
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from kvbench.config import ARCHITECTURES, GROUPS, MEASURES, check_measures, did_you_mean, method_configs
from kvbench.errors import EXIT_SOME_FAILED, EXIT_USER_ERROR, UserError
from kvbench.status import describe, survey
from kvbench.sweep.plan import LAUNCHER, Sweep, is_setting, job_of, job_record, launcher_of, plan_sweep
from kvbench.sweep.signals import Terminated
from kvbench.sweep.watch import until_idle, wait_for_jobs

INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
FLAGS = {"-m": (), "--multirun": (), "--resolve": (), "-c": ("job", "hydra", "all"), "--cfg": ("job", "hydra", "all"),
         "-i": INFO, "--info": INFO}  # fmt: skip
"""Hydra's flags that mean something here, and the values they take."""

PACKS = ("methods", "none")
LISTS = ("compare", "measure", "needle.lengths", "needle.depths", "memory.contexts", "latency.contexts")

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
        print(f"sweep: {sweep.folder}\nhow it goes: python -m kvbench.status {sweep.folder}", flush=True)
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

        from kvbench.report.tables import TerminalTable

        Console().print(TerminalTable(rows))
    print(describe(found))
    print(f"report: python -m kvbench.report {sweep.folder}")
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
        if word in ("fetch", "report", "plan", "check", "status"):
            advice = f"python -m kvbench.{word}"
        raise UserError(f"'{word}' is not KEY=VALUE; type {advice}, for example")
    if key in (*GROUPS, "experiment") and value.strip("'\"") in ("", "null"):
        raise UserError(f"{word} names nothing; choose from {', '.join(names(key))}")
    if key in GROUPS and value.startswith("["):
        raise UserError(f"{word} is a list, and {key} takes one name; {several(key, value.strip('[]'))}")
    if key == "sweep.pack" and value not in PACKS:
        raise UserError(f"{word} is unknown; type {' or '.join(f'sweep.pack={choice}' for choice in PACKS)}")


def several(key: str, values: str) -> str:
    """What to type instead of KEY=a,b."""
    if key in LISTS:
        return f"type {key}='[{values}]'"
    sweep = f"-m {key}={values} to run one after another"
    return f"type compare='[{values}]' to compare them, or {sweep}" if key == "method" else f"type {sweep}"


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


def names(group: str) -> dict[str, str]:
    """The choices of a config group, each with the first line of its comment."""
    found = {}
    for file in choices(group):
        comments = (line[2:] for line in file.read_text().splitlines() if line.startswith("# "))
        found[file.name.removesuffix(".yaml")] = next((line for line in comments if "@package" not in line), "")
    return found


def choices(group: str) -> list[Traversable]:
    """The files of a config group, by name."""
    files = [file for file in resources.files("kvbench.conf").joinpath(group).iterdir() if file.name.endswith(".yaml")]
    return sorted(files, key=lambda file: file.name)


def help_text() -> str:
    """One line a method, store, measure and model."""
    lines = [
        "kvbench: what each way of shrinking the KV cache costs in quality, and gives in memory and speed.",
        "",
        "  python -m kvbench method=h2o budget=1000",
        "  python -m kvbench compare='[full,kivi4,h2o,h2o+int4]' budget=256 measure='[perplexity,needle]'",
        "  python -m kvbench.fetch smollm2-135m essays      the offline model and text",
        "  python -m kvbench -m method=full,h2o budget=256,1000 hydra/launcher=slurm   a sweep (joblib, local, ray)",
        "  python -m kvbench.status results/...             what of a sweep is done, running, failed, missing",
        "  python -m kvbench.report results/...             tables and plots of one or many runs",
        "  python -m kvbench method=h2o --cfg job           every setting, with what you changed",
        "",
    ]
    groups = {"method": "Methods (method=)", "store": "Stores (store=)", "model": "Models (model=)",
              "data": "Texts (data=)", "experiment": "Presets (experiment=)"}  # fmt: skip
    listings = {title: names(group) for group, title in groups.items()}
    listings["Measures (measure='[...]')"] = MEASURES
    for title, entries in listings.items():
        lines += [f"{title}:", *(f"  {name:<18} {line}" for name, line in entries.items()), ""]
    lines += ["A budget is a number of tokens per KV head (budget=256) or a share of the prompt (budget=0.25).",
              "Quote brackets: compare='[full,h2o]'."]  # fmt: skip
    return "\n".join(lines)


def one_line(error: BaseException) -> str:
    """What is wrong and what to type instead, in one line, from whatever Hydra and OmegaConf raise."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UserError):
            return str(cause)
        cause = cause.__cause__
    text = str(error)
    if "Could not find '" in text:
        return unknown_choice(text.split("Could not find '")[1].split("'")[0])
    if "Could not override '" in text:
        return unknown_key(text.split("Could not override '")[1].split("'")[0])
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    if first.startswith("Error in call to target"):
        return f"{first} {error.__cause__}"
    if first.startswith("Ambiguous value for argument '"):
        word = first.split("'", 1)[1].rsplit("'", 1)[0]
        return f"{word} gives several values; {several(*word.split('=', 1))}"
    if type(error).__name__ == "OverrideParseException":
        return (
            f"cannot read the command line: {first} (quote brackets and spaces: compare='[full,h2o]'; "
            f"other signs twice: data.path='\"a=b.txt\"')"
        )
    return first


def unknown_choice(choice: str) -> str:
    """The line for a name that a config group does not have."""
    group, _, name = choice.partition("/")
    if group == "method" and name in ARCHITECTURES:
        return f"{name} is an architecture, decided by the checkpoint and no cache method; type {ARCHITECTURES[name]}"
    if group == "method" and name in names("store"):
        return f"{name} is a store, which holds what a method keeps; type method=full store={name}, or full+{name}"
    known = names(group) if name else {}
    if not known:
        return f"{choice} is unknown; python -m kvbench --help lists what there is"
    return f"{group}={name} is unknown{did_you_mean(name, known)}; choose from {', '.join(known)}"


def unknown_key(key: str) -> str:
    """The line for a key that the config does not have."""
    root = root_settings()
    known, parent = list(root), key.rpartition(".")[0]
    if isinstance(root.get(parent), dict):
        known = [f"{parent}.{k}" for k in root[parent]]
    elif parent in ("model", "data"):
        known = sorted({f"{parent}.{k}" for file in choices(parent) for k in yaml_of(file)})
    elif parent.split(".")[0] in GROUPS:
        return f"{key} is not set in {parent}; type +{key}=VALUE to add it"
    return f"{key} is no setting{did_you_mean(key, known)}; choose from {', '.join(known)}"


def root_settings() -> dict[str, Any]:
    """The root of the config, with the groups as keys without a value."""
    root = yaml_of(resources.files("kvbench.conf").joinpath("config.yaml"))
    return {key: root[key] for key in root if key not in ("defaults", "hydra")} | dict.fromkeys(
        (*GROUPS, "experiment")
    )


def yaml_of(file: Traversable) -> dict[str, Any]:
    """A config file's own content, nothing resolved."""
    import yaml  # type: ignore[import-untyped]

    content: dict[str, Any] = yaml.safe_load(file.read_text())
    return content


if __name__ == "__main__":
    sys.exit(main())
