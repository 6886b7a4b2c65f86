"""What may be compared with what: lines, baselines, names, verdicts and warnings."""
