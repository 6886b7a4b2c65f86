"""One file per method: the algorithm as its paper states it. A yaml's `_target_` names the class."""
