"""What a run folder's config.yaml records. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from kvbench.results.checks import skip
from kvbench.results.headline import Headline, headlines_from
from kvbench.results.run_files import CONFIG


def read_config(run: Path) -> dict[str, Any]:
    """The resolved config of a run folder; {} where config.yaml is missing or, after a warning, cannot be read."""
    try:
        content = yaml.load((run / CONFIG).read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        skip(run / CONFIG, f"it is no readable YAML file ({error})")
        return {}
    return content if isinstance(content, dict) else {}


def recorded_headlines(configs: Iterable[Mapping[str, Any]]) -> dict[str, tuple[Headline, ...]]:
    """For each measure the headlines that the configs record under `headlines:`; the last config that has some wins."""
    found: dict[str, tuple[Headline, ...]] = {}
    for config in configs:
        node = config.get("headlines")
        for measure, records in node.items() if isinstance(node, Mapping) else ():
            if isinstance(records, list) and (headlines := headlines_from(records)):
                found[str(measure)] = headlines
    return found
