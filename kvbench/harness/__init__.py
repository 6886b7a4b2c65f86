"""lm-evaluation-harness through compressed caches: `python -m kvbench.harness method=h2o budget=256 tasks=arc_easy`."""
