"""Whether the model and data set hub can be reached. Asked once and briefly, so that an offline node fails at once."""

from __future__ import annotations

from functools import cache

PROBE_SECONDS = 5.0


def hub_or_cache() -> bool:
    """Whether data sets can be loaded: the hub answers, or HF_HUB_OFFLINE=1 allows the local cache."""
    from huggingface_hub import constants

    return hub_reachable() or bool(constants.HF_HUB_OFFLINE)


@cache
def hub_reachable() -> bool:
    """Whether the hub answers. False under HF_HUB_OFFLINE=1 without asking.

    Without this check huggingface_hub retries each file for half a minute before it fails.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=PROBE_SECONDS)
    except Exception:  # the HTTP library behind the session, and so its exceptions, differs between versions
        return False
    return True
