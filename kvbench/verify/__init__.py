"""`python -m kvbench.verify RUN_FOLDER`: are the numbers of a run folder what its settings give?"""
