"""What the command line answers: the help, and the one line for a name, a key or a value that cannot be used."""

import re
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from kvbench.config import ARCHITECTURES, GROUPS, KNOBS, MEASURES, OTHER_KNOBS, did_you_mean
from kvbench.errors import UserError

LISTS = (
    "compare",
    "measure",
    "needle.lengths",
    "needle.depths",
    "needle.tasks",
    "needle.question",
    "tasks.names",
    "tasks.question",
    "fidelity.contexts",
    "memory.contexts",
    "latency.contexts",
    "latency.batches",
)
SWITCHES = ("kernel", "threads", "results_dir", "save_tokens", "save_kept", "rerun", "skip_larger")


def several(key: str, values: str) -> str:
    """What to type instead of KEY=a,b."""
    if key in LISTS:
        return f"type {key}='[{values}]'"
    sweep = f"-m {key}={values} to run one after another"
    return f"type compare='[{values}]' to compare them, or {sweep}" if key == "method" else f"type {sweep}"


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


def settings(*keys: str) -> dict[str, str]:
    """Root keys of config.yaml, each with the comment on its line."""
    text = resources.files("kvbench.conf").joinpath("config.yaml").read_text()
    return {key: next(iter(re.findall(rf"^{key}: \S+ *# (.*)$", text, re.M)), "") for key in keys}


def help_text() -> str:
    """One line a method, store, measure, model and knob."""
    lines = [
        "kvbench: what each way of shrinking the KV cache costs in quality, and gives in memory and speed.",
        "",
        "  python -m kvbench method=h2o budget=1000",
        "  python -m kvbench compare='[full,kivi4,h2o,h2o+int4]' budget=256 measure='[perplexity,needle]'",
        "  python -m kvbench.fetch smollm2-135m essays      the offline model and text",
        "  python -m kvbench -m method=full,h2o budget=256,1000 hydra/launcher=slurm   a sweep (joblib, local, ray)",
        "  python -m kvbench.status results/...             what of a sweep is done, running, failed, missing",
        "  python -m kvbench.plan model=llama3.1-8b context=32768 memory=80GiB     bytes by formula, without weights",
        "  python -m kvbench.report results/...             tables and plots of one or many runs",
        "  python -m kvbench.check                          identities that must hold on this machine, pass or fail",
        "  python -m kvbench.harness method=h2o budget=256 tasks=arc_easy   tasks of lm-evaluation-harness",
        "  python -m kvbench method=h2o --cfg job           every setting, with what you changed",
        "",
    ]
    groups = {
        "method": "Methods (method=)",
        "store": "Stores (store=)",
        "model": "Models (model=)",
        "data": "Texts (data=)",
        "experiment": "Presets (experiment=)",
    }
    listings = {title: names(group) for group, title in groups.items()}
    listings["Measures (measure='[...]')"] = MEASURES
    listings["Knobs (budget=256; each method's line names its own)"] = settings(*KNOBS, *OTHER_KNOBS)
    listings["Switches"] = settings(*SWITCHES)
    width = max(len(name) for entries in listings.values() for name in entries)
    for title, entries in listings.items():
        lines += [f"{title}:", *(f"  {name:<{width}} {line}" for name, line in entries.items()), ""]
    lines += [
        "A budget is a number of tokens per KV head (budget=256) or a share of the prompt (budget=0.25).",
        "compare='[...]' takes METHOD, METHOD+STORE, or overrides: '[h2o+int4,\"method=snapkv budget=512\"]'.",
        "Quote brackets: compare='[full,h2o]'.",
    ]
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
    rule, plus, store = name.partition("+")
    if group == "method" and plus and rule in names("method"):
        return f"{name} is a method and a store; type method={rule} store={store or 'int4'}, or compare='[{name}]'"
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
        known = sorted({f"{parent}.{k}" for file in choices(parent) for k in yaml_of(file) if k != "defaults"})
    elif parent.split(".")[0] in GROUPS:
        return f"{key} is not set in {parent}; type +{key}=VALUE to add it"
    return f"{key} is no setting{did_you_mean(key, known)}; choose from {', '.join(known)}"


def root_settings() -> dict[str, Any]:
    """The root of the config, with the groups as keys without a value."""
    root = yaml_of(resources.files("kvbench.conf").joinpath("config.yaml"))
    return {key: root[key] for key in root if key not in ("defaults", "hydra")} | dict.fromkeys((*GROUPS, "experiment"))


def yaml_of(file: Traversable) -> dict[str, Any]:
    """A config file's own content, nothing resolved."""
    import yaml  # type: ignore[import-untyped]

    content: dict[str, Any] = yaml.safe_load(file.read_text())
    return content
