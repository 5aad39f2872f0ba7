"""Tests of fused_norm.integrations beside the packages of the stacks, which only the environment of
`make stacks` has."""

import os
import sys

import pytest
import torch

# diffusers, megatron-core and torchtitan are for newer Pythons than 3.10.
NEEDS_PYTHON = {
    "test_foreign_norms.py": (3, 11),
    "test_megatron.py": (3, 11),
    "test_torchtitan.py": (3, 11),
}
if os.environ.get("FUSED_NORM_STACKS") == "1":
    collect_ignore = [file for file, version in NEEDS_PYTHON.items() if sys.version_info < version]
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def calls():
    """Counts this library's operators as a profiler shows them: calls(function, name)."""

    def count(function, name):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            function()
        events = {event.key: event.count for event in profile.key_averages()}
        return events.get(f"fused_norm::{name}", 0)

    return count
