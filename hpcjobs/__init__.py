"""Tune and train models on Slurm clusters with partitioned GPUs: a study is a folder on the shared filesystem."""
