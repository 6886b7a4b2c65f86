"""`python -m kvbench.fetch smollm2-135m essays`: the model and the text that need no model hub."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvbench.cli.downloads import check_terms, fetch
from kvbench.errors import EXIT_USER_ERROR, UserError
from kvbench.offline import RECIPES, fetch_command, recipe_for


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvbench.fetch",
        description="Fetch the offline model and text into the cache folder "
        "(KVBENCH_CACHE, default the user's cache folder); what is there already is left alone.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one or more of: {', '.join(RECIPES)}")
    parser.add_argument(
        "--for",
        dest="overrides",
        metavar="OVERRIDES",
        help='every model and text that a command names: --for "model=smollm2-135m,hub data=essays"',
    )
    parser.add_argument(
        "--accept-license", action="store_true", help="accept the terms of what comes under a licence of its own"
    )
    given = parser.parse_args(arguments)
    names = given.names
    try:
        if not names and given.overrides is None:
            raise UserError(f'nothing is named: type {fetch_command("smollm2-135m essays")}, or --for "OVERRIDES"')
        for name in names:
            recipe_for(name)  # a wrong name is refused before anything is downloaded
        for name in names:
            check_terms(name, given.accept_license)
        for name in names:
            print(f"{name}: {fetch(name, given.accept_license)}", flush=True)
        if given.overrides is not None:
            from kvbench.cli.fetch_for import fetch_for  # brings Hydra in

            for line in fetch_for(given.overrides, given.accept_license):
                print(line, flush=True)
    except UserError as error:
        print(f"kvbench.fetch: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("kvbench.fetch: interrupted; nothing half-done was kept", file=sys.stderr)
        return 130
    return 0
