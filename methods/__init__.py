"""One file a method: the algorithm as its paper states it. Hydra's `_target_` names the class."""
