"""One line for a name, a key or a value that cannot be used: what was given, what is allowed, what to type."""

from omegaconf import DictConfig

from kvbench.config.knobs import GROUPS, MEASURES, PRESETS, did_you_mean
from kvbench.config.sources import BUILT_IN, ConfigSources
from kvbench.errors import UserError

ARCHITECTURES = {
    "mha": "model=llama2-7b (as many KV heads as query heads), or model=smollm2-135m model.kv_heads=9",
    "gqa": "model=smollm2-135m (3 KV heads for 9 query heads)",
    "mqa": "model=gemma3-270m (1 KV head)",
    "mla": "model=deepseek-v2-lite (latent attention)",
}


def one_line(error: BaseException, sources: ConfigSources = BUILT_IN) -> str:
    """What is wrong and what to type instead, in one line, from whatever Hydra and OmegaConf raise."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UserError):
            return str(cause)
        cause = cause.__cause__
    text = str(error)
    if "Could not find '" in text:
        return unknown_choice(text.split("Could not find '")[1].split("'")[0], sources)
    if "Could not override '" in text:
        return unknown_key(text.split("Could not override '")[1].split("'")[0], sources)
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    if first.startswith("Error in call to target"):
        return f"{first} {error.__cause__}"
    if first.startswith("Error merging override "):
        word = first.removeprefix("Error merging override ").lstrip("+")
        return f"{word}: {word.split('=', 1)[0]} takes another kind of value; --cfg job shows the present one"
    if first.startswith("Ambiguous value for argument '"):
        word = first.split("'", 1)[1].rsplit("'", 1)[0].lstrip("+")
        key, _, values = word.partition("=")
        return f"{word} gives several values; {several(key, values, sources)}"
    if type(error).__name__ == "OverrideParseException":
        return (
            f"cannot read the command line: {first} (quote brackets and spaces: compare='[full,h2o]'; "
            f"other signs twice: data.path='\"a=b.txt\"')"
        )
    return first


def user_error(error: Exception, sources: ConfigSources = BUILT_IN) -> UserError:
    """The one line as an exception, for callers who are promised UserError."""
    return error if isinstance(error, UserError) else UserError(one_line(error, sources))


def several(key: str, values: str, sources: ConfigSources = BUILT_IN) -> str:
    """What to type instead of KEY=a,b."""
    if key in list_keys(sources):
        return f"type {key}='[{values}]'"
    sweep = f"-m {key}={values} to run one after another"
    return f"type compare='[{values}]' to compare them, or {sweep}" if key == "method" else f"type {sweep}"


def list_keys(sources: ConfigSources) -> list[str]:
    """Keys that take a list."""
    nodes = sources.content(MEASURES)
    settings = [
        f"{name}.{key}" for name, node in nodes.items() for key, value in node.items() if isinstance(value, list)
    ]
    return ["compare", "measure", *settings]


def unknown_choice(choice: str, sources: ConfigSources = BUILT_IN) -> str:
    """The line for a name that a config group does not have."""
    group, _, name = choice.partition("/")
    if group == "method" and name in ARCHITECTURES:
        return f"{name} is an architecture, decided by the checkpoint, not a method; type {ARCHITECTURES[name]}"
    if group == "method" and name in sources.names("store"):
        return f"{name} is a store, which holds what a method keeps; type method=full store={name}, or full+{name}"
    rule, plus, store = name.partition("+")
    if group == "method" and plus and rule in sources.names("method"):
        return f"{name} is a method and a store; type method={rule} store={store or 'int4'}, or compare='[{name}]'"
    known = sources.names(group) if name else {}
    if not known:
        return f"{choice} is unknown; python -m kvbench --help lists what there is"
    return f"{group}={name} is unknown{did_you_mean(name, known)}; choose from {', '.join(known)}"


def unknown_key(key: str, sources: ConfigSources = BUILT_IN) -> str:
    """The line for a key that the config does not have."""
    root = root_keys(sources)
    known, parent = list(root), key.rpartition(".")[0]
    if isinstance(node := root.get(parent), dict):
        known = [f"{parent}.{name}" for name in node if name != "_target_"]
    elif parent in ("model", "data"):
        files = sources.content(parent).values()
        known = sorted({f"{parent}.{name}" for file in files for name in file if name != "defaults"})
    elif parent.split(".")[0] in GROUPS:
        return f"{key} is not set in {parent}; type +{key}=VALUE to add it"
    return f"{key} is no setting{did_you_mean(key, known)}; choose from {', '.join(known)}"


def root_keys(sources: ConfigSources) -> dict[str, object]:
    """Every root key that may be set, with its default where config.yaml or a measure's file has one."""
    return dict.fromkeys((*GROUPS, PRESETS, *sources.knobs)) | sources.root


def check_root(config: DictConfig, sources: ConfigSources) -> None:
    """Raise UserError for a root key that no source declares (`+budgt=16`), and for a measure that is no mapping."""
    if added := sorted(str(key) for key in config if key not in root_keys(sources)):
        raise UserError(unknown_key(added[0], sources))
    for name, file in sources.files(MEASURES).items():
        node = config[name]
        if not isinstance(node, DictConfig):
            raise UserError(f"{name}={node} is not a group of settings; type {name}.KEY=VALUE")
        if not isinstance(node.get("_target_"), str):
            raise UserError(f"measure {name} names no class; write _target_: package.Class into {file}")
