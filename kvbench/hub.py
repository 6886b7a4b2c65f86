"""The model and data set hub: is it there? Asked once, briefly, so that an offline node fails at once."""

from __future__ import annotations

from functools import cache

PROBE_SECONDS = 5.0


def hub_or_cache() -> bool:
    """Whether data sets can be had: the hub answers, or HF_HUB_OFFLINE=1 says to take what its cache holds."""
    from huggingface_hub import constants

    return hub_reachable() or bool(constants.HF_HUB_OFFLINE)


@cache
def hub_reachable() -> bool:
    """Whether the hub answers. False under HF_HUB_OFFLINE=1 without asking.

    Without this, huggingface_hub retries every single file for half a minute before it gives up.
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
