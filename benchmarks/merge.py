"""Tables and plots of the parts of one run, or of several suites: FILES are their CSV files.

Of `model` the processes of all files are put together.
"""

import itertools
from pathlib import Path

from benchmarks import attention_report, flag, model, report, result_files, results

needs_gpu = False


def add_arguments(parser):
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")


def merge_facts(many):
    """Facts of several files: a name once, its different values in order."""
    values = {}
    for facts in many:
        for name, value in facts:
            values.setdefault(name, []).append(value)
    return [(name, "; ".join(dict.fromkeys(found))) for name, found in values.items()]


def merge_results(many):
    """All results; ValueError where two parts have the same one."""
    merged = [result for measured in many for result in measured]
    seen = set()
    for result in merged:
        key = (result.case, result.peer)
        if key in seen:
            raise ValueError(f"{results.name(result.case)}, {result.peer} is in two of the files.")
        seen.add(key)
    return merged


def read_suites(files):
    """{suite: [(facts, results) of each of its files]}"""
    suites = {}
    for path in files:
        facts, measured = results.read(path)
        suites.setdefault(dict(facts).get("suite", path.stem), []).append((facts, measured))
    return suites


def run(options):
    def of(cls):
        return {
            path: found for path in options.files if (found := result_files.read_csv(path, cls))
        }

    files = options.files
    for module in (model, attention_report, flag):
        if found := of(module.Record):
            facts = merge_facts(facts for facts, _ in found.values())
            join = getattr(module, "joined", lambda many: list(itertools.chain(*many)))
            module.write(facts, join(r for _, r in found.values()), options.out)
        files = [path for path in files if path not in found]
    suites = {
        suite: (merge_facts(facts for facts, _ in parts), merge_results(r for _, r in parts))
        for suite, parts in read_suites(files).items()
    }
    for suite, (facts, measured) in suites.items():
        report.write(suite, measured, facts, options.out)
    return 0
