"""The suites norm, softmax, sweep and overhead, one after the other.

With `--part` each suite is cut into as many parts; overhead is in the first.
"""

import argparse

from benchmarks import commandline, measure, norm, overhead, softmax, sweep

SUITES = (norm, softmax, sweep)


def add_arguments(parser):
    commandline.add_run_arguments(parser)


def options_of(suite, options):
    """The suite's own defaults, with what was given here."""
    parser = argparse.ArgumentParser()
    suite.add_arguments(parser)
    return argparse.Namespace(**vars(parser.parse_args([])) | vars(options) | {"jobs": 0})


def run(options):
    if options.jobs and not options.compile_only:
        measure.compile_ahead(options.jobs)
    suites = SUITES
    if options.part.k == 1 and not options.compile_only:
        suites = (overhead, *SUITES)
    return max(suite.run(options_of(suite, options)) for suite in suites)
