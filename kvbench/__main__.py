"""`python -m kvbench method=h2o budget=1000`: the command line. Imports no torch until there is something to run."""

import os
import sys
from importlib import resources
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from kvbench.config import ARCHITECTURES, MEASURES, check_measures, did_you_mean, method_configs
from kvbench.errors import UserError

HYDRA_FLAGS = ("-m", "--multirun", "-c", "--cfg", "--resolve", "-p", "--package", "-i", "--info")
EXIT_USER_ERROR, EXIT_INTERRUPTED = 2, 130


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 all measured, 2 unusable input, 3 some cells failed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if any(word in ("-h", "--help", "help", "--hydra-help") for word in arguments):
        print(help_text())
        return 0
    codes: list[int] = []
    try:
        words = check_words(arguments)
        run_hydra(pack(words) if "-m" in words or "--multirun" in words else words, codes)
    except (UserError, HydraException, OmegaConfBaseException) as error:
        print(f"kvbench: {one_line(error)}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return max(codes, default=0)


def run_hydra(words: list[str], codes: list[int]) -> None:
    """Compose the config and run each job; `codes` collects what each came to.

    A job never raises what a user is meant to read: one unusable cell must not end a sweep, and Hydra would print its
    own lines around it.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"

    @hydra.main(version_base="1.3", config_path="pkg://kvbench.conf", config_name="config")
    def task(config: DictConfig) -> None:
        try:
            codes.append(run_task(config, list(HydraConfig.get().overrides.task)))
        except (UserError, HydraException, OmegaConfBaseException) as error:
            print(f"kvbench: {one_line(error)}", file=sys.stderr)
            codes.append(EXIT_USER_ERROR)

    before = sys.argv
    sys.argv = ["kvbench", *words]
    try:
        task()
    finally:
        sys.argv = before


def run_task(config: DictConfig, overrides: list[str]) -> int:
    """One job: its methods and measures are checked first, then torch is imported and everything runs."""
    check_measures(config.measure)
    methods = method_configs(config, overrides)
    from kvbench.run import run

    return run(config, methods)


def check_words(arguments: list[str]) -> list[str]:
    """The arguments, unless one is neither a flag that Hydra knows nor KEY=VALUE. Raises UserError."""
    takes_value = False
    for word in arguments:
        if takes_value or word.startswith("~"):
            takes_value = False
            continue
        if word.startswith("-"):
            if word not in HYDRA_FLAGS:
                raise UserError(f"{word} is no option; type python -m kvbench --help, or KEY=VALUE such as method=h2o")
            takes_value = word in ("-c", "--cfg", "-p", "--package", "-i", "--info")
        elif "=" not in word:
            advice = next((f"{group}={word}" for group in ("method", "model") if word in names(group)), "method=h2o")
            if word in ("fetch", "report", "plan", "check", "status"):
                advice = f"python -m kvbench.{word}"
            raise UserError(f"'{word}' is not KEY=VALUE; type {advice}, for example")
    return arguments


def pack(words: list[str]) -> list[str]:
    """Under -m: `method=a,b,c` becomes `compare=[a,b,c]`, so that the methods share a job and its prefills."""
    if any(word.startswith(("compare=", "store=")) for word in words):
        return words
    packed = []
    for word in words:
        methods = word.removeprefix("method=").split(",")
        is_list = word.startswith("method=") and len(methods) > 1 and all(m in names("method") for m in methods)
        packed.append(f"compare=[{','.join(methods)}]" if is_list else word)
    return packed


def names(group: str) -> dict[str, str]:
    """The choices of a config group, each with the first line of its comment."""
    folder = resources.files("kvbench.conf").joinpath(group)
    found = {}
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".yaml"):
            comments = (line[2:] for line in file.read_text().splitlines() if line.startswith("# "))
            found[file.name.removesuffix(".yaml")] = next((line for line in comments if "@package" not in line), "")
    return found


def help_text() -> str:
    """One line a method, store, measure and model."""
    lines = [
        "kvbench: what each way of shrinking the KV cache costs in quality, and gives in memory and speed.",
        "",
        "  python -m kvbench method=h2o budget=1000",
        "  python -m kvbench compare='[full,kivi4,h2o,h2o+int4]' budget=256 measure='[perplexity,needle]'",
        "  python -m kvbench.fetch smollm2-135m essays      the offline model and text",
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
    if type(error).__name__ == "OverrideParseException":
        return f"cannot read the command line: {first} (quote brackets and spaces: compare='[full,h2o]')"
    return first


def unknown_choice(choice: str) -> str:
    """The line for a name that a config group does not have."""
    group, _, name = choice.partition("/")
    if group == "method" and name in ARCHITECTURES:
        return f"{name} is an architecture, decided by the checkpoint and no cache method; type {ARCHITECTURES[name]}"
    known = names(group) if name else {}
    if not known:
        return f"{choice} is unknown; python -m kvbench --help lists what there is"
    return f"{group}={name} is unknown{did_you_mean(name, known)}; choose from {', '.join(known)}"


def unknown_key(key: str) -> str:
    """The line for a key that the config does not have."""
    import yaml  # type: ignore[import-untyped]

    root: dict[str, Any] = yaml.safe_load(resources.files("kvbench.conf").joinpath("config.yaml").read_text())
    known = [k for k in root if k not in ("defaults", "hydra")] + ["method", "store", "model", "data", "experiment"]
    parent = key.rpartition(".")[0]
    if parent in root and isinstance(root[parent], dict):
        known = [f"{parent}.{k}" for k in root[parent]]
    return f"{key} is no setting{did_you_mean(key, known)}; choose from {', '.join(known)}"


if __name__ == "__main__":
    sys.exit(main())
