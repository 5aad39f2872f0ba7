"""What was measured: results, the file that keeps them, and the verdict on each case.

A CSV file holds lines ``# name: value`` with the facts of the run, then a line a result.
"""

import collections
import csv
import dataclasses

from benchmarks import result_files

OURS = "fused_norm"
AHEAD = 1.02  # a peer is ahead when it is faster by more than this


@dataclasses.dataclass(frozen=True)
class Result:
    """One implementation at one case. Times in seconds.

    `seconds` is None where the implementation cannot run the case; `note` says why. `ideal` is None
    where the time is the host's.
    """

    operation: str
    direction: str
    rows: int
    cols: int
    dtype: str
    peer: str
    ideal: float | None
    target: float
    seconds: float | None = None
    error: float | None = None  # largest error over its bound
    note: str = ""
    study: str = "shapes"  # which question the case belongs to
    bytes: int = 0  # the least that must be moved

    @property
    def case(self):
        return (self.study, self.operation, self.direction, self.rows, self.cols, self.dtype)

    @property
    def ours(self):
        return self.peer.startswith(OURS)

    @property
    def correct(self):
        return self.error is not None and self.error <= 1

    @property
    def counts(self):
        """A time of something that gave right results."""
        return self.seconds is not None and self.correct

    @property
    def fraction(self):
        return self.ideal / self.seconds if self.ideal else None


def by_case(results):
    """{case: its results}, in the order of their first appearance."""
    cases = collections.defaultdict(list)
    for result in results:
        cases[result.case].append(result)
    return dict(cases)


def own(results):
    """Our result among those of one case, or None."""
    return next((r for r in results if r.peer == OURS), None)


def best_rival(results):
    rivals = [r for r in results if not r.ours and r.counts]
    return min(rivals, key=lambda r: r.seconds, default=None)


def verdict(results):
    """Our result against its target and against the peers; `results` are those of one case."""
    ours = own(results)
    if ours is None or ours.seconds is None:
        return "-"
    if not ours.correct:
        return "WRONG"
    over = ours.seconds / ours.target - 1
    words = ["met" if over <= 0 else f"{over:.0%} over" if over >= 0.005 else "<1% over"]
    if ours.study == "host":  # a multiple of torch's time is the target
        return words[0]
    best = best_rival(results)
    if best is not None and best.seconds * AHEAD < ours.seconds:
        words.append(f"{best.peer} ahead by {ours.seconds / best.seconds - 1:.0%}")
    return ", ".join(words)


def summary(results):
    """Sentences: how many cases of each study met their target, and in which a peer is ahead."""
    sentences = []
    for study in dict.fromkeys(r.study for r in results):
        cases = by_case(r for r in results if r.study == study)
        verdicts = {case: verdict(of_case) for case, of_case in cases.items()}
        verdicts = {case: words for case, words in verdicts.items() if words != "-"}
        if not verdicts:
            continue
        met = sum(words.startswith("met") for words in verdicts.values())
        ahead = {case: words for case, words in verdicts.items() if "ahead" in words}
        wrong = sum(words == "WRONG" for words in verdicts.values())
        sentence = f"{study}: {met} of {len(verdicts)} cases meet the target"
        compared = sum(best_rival(cases[case]) is not None for case in verdicts)
        if study != "host" and compared:
            sentence += (
                f"; a peer is ahead in {len(ahead)} of the {compared} where one was measured"
            )
        elif study != "host":
            sentence += "; no peer was measured"
        sentences.append(sentence + (f"; {wrong} WRONG." if wrong else "."))
        sentences += [f"  {name(case)}: {words}" for case, words in ahead.items()]
    return sentences


def name(case):
    _, operation, direction, rows, cols, dtype = case
    return f"{operation} {direction} {rows} x {cols} {dtype}"


COLUMNS = (
    "study", "operation", "direction", "rows", "cols", "dtype", "implementation", "microseconds",
    "ideal_us", "target_us", "fraction", "bytes", "error_over_bound", "note",
)  # fmt: skip


def write(path, facts, results):
    def microseconds(seconds):
        return "" if seconds is None else f"{seconds * 1e6:.3f}"

    rows = []
    for r in results:
        fraction = f"{r.fraction:.4f}" if r.seconds is not None and r.ideal else ""
        error = "" if r.error is None else f"{r.error:.3g}"
        times = [microseconds(t) for t in (r.seconds, r.ideal, r.target)]
        rows.append([*r.case, r.peer, *times, fraction, r.bytes, error, r.note])
    result_files.write_lines(path, facts, COLUMNS, rows)


def read(path):
    """(facts, results) of a file that `write` wrote; ValueError in one sentence if it is none."""

    def seconds(text):
        return float(text) * 1e-6 if text else None

    results = []
    try:
        facts, lines = result_files.split(path.read_text().splitlines())
        if not lines or tuple(lines[0].split(",")) != COLUMNS:
            raise ValueError(f"{path} is no file of results: its header has other columns.")
        for row in csv.DictReader(lines):
            results.append(
                Result(
                    row["operation"],
                    row["direction"],
                    int(row["rows"]),
                    int(row["cols"]),
                    row["dtype"],
                    row["implementation"],
                    seconds(row["ideal_us"]),
                    seconds(row["target_us"]),
                    seconds(row["microseconds"]),
                    float(row["error_over_bound"]) if row["error_over_bound"] else None,
                    row["note"],
                    row["study"],
                    int(row["bytes"]),
                )
            )
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ValueError(f"{path} cannot be read: {reason}.") from None
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path} has a broken line: {error}.") from None
    return facts, results
