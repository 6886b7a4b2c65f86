"""The help: one line for each method, store, measure, model, text, preset and knob, outside ones included."""

from kvbench.config.knobs import KNOBS, MEASURES, OTHER_KNOBS, PREFILL_CHUNK
from kvbench.config.sources import ConfigSources, comment_of, root_text

SWITCHES = ("kernel", "threads", "results_dir", "save_tokens", "save_kept", "rerun", "skip_larger", "trust")

COMMANDS = (
    ("python -m kvbench method=h2o budget=1000", "measure one method beside the full cache"),
    ("python -m kvbench compare='[full,kivi4,h2o,h2o+int4]' budget=256", "measure several methods from one prefill"),
    ("python -m kvbench -m method=full,h2o budget=256,1000", "a sweep (hydra/launcher=slurm, joblib, local, ray)"),
    ("python -m kvbench method=h2o --cfg job", "every setting, with your changes"),
    ("python -m kvbench --config-dir DIR method=mine", "a method of your own: DIR/method/mine.yaml"),
    ("python -m kvbench.fetch smollm2-135m essays", "download the offline model and text"),
    ("python -m kvbench.plan model=llama3.1-8b context=32768", "bytes of each cache by formula, without weights"),
    ("python -m kvbench.check", "test the engine's identities on this machine"),
    ("python -m kvbench.status results/...", "progress of a sweep"),
    ("python -m kvbench.report results/...", "tables and figures of one or many runs"),
    ("python -m kvbench.verify results/RUN", "measure drawn samples of a run again: pass or fail"),
    ("python -m kvbench.board results/", "a page of the verified runs"),
    ("python -m kvbench.harness method=h2o budget=256 tasks=arc_easy", "tasks of lm-evaluation-harness"),
)

LISTINGS = {
    "method": "Methods (method=)",
    "store": "Stores (store=)",
    MEASURES: "Measures (measure='[...]')",
    "model": "Models (model=)",
    "data": "Texts (data=)",
    "experiment": "Presets (experiment=)",
}


def help_text(sources: ConfigSources) -> str:
    """The whole help. Raises UserError where a source holds a file that is no config."""
    width = max(len(command) for command, _ in COMMANDS)
    lines = [
        "kvbench: what each way of compressing the KV cache costs in quality, and what it saves in memory and time.",
        "",
        *(f"  {command:<{width}}   {what}" for command, what in COMMANDS),
        "",
    ]
    listings = {title: sources.names(group) for group, title in LISTINGS.items()}
    listings["Knobs (budget=256; the line of each method and store names its own)"] = knob_lines(sources)
    listings["Switches"] = {key: comment_of(key, root_text()) for key in SWITCHES}
    width = max(len(name) for entries in listings.values() for name in entries)
    for title, entries in listings.items():
        lines += [f"{title}:", *(f"  {name:<{width}} {line}" for name, line in entries.items()), ""]
    lines += [
        "A budget is a number of tokens per KV head (budget=256) or a share of the prompt (budget=0.25).",
        "compare='[...]' takes METHOD, METHOD+STORE, or overrides: '[h2o+int4,\"method=snapkv budget=512\"]'.",
        "Quote brackets: compare='[full,h2o]'.",
        "--config-dir DIR adds methods, stores, measures, models and texts: DIR/method/mine.yaml, DIR/measures/...",
    ]
    return "\n".join(lines)


def knob_lines(sources: ConfigSources) -> dict[str, str]:
    """Each knob with its comment: those of config.yaml, then those that outside files declare."""
    text = root_text()
    declared = {key: comment_of(key, text) for key in (*KNOBS, *OTHER_KNOBS)}
    of_prefill = text.partition("\nprefill:")[2].lstrip()
    return declared | {PREFILL_CHUNK: comment_of("chunk", of_prefill)} | sources.knobs
