"""Figures in the sentences of documents, and where they come from.

A sentence has ``{}`` in place of each figure; ``figures`` gives the texts, of result files or of
what the library itself says. NO_RESULTS names figures that are not results at all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ultraep_comm.model import MACHINES

Results = Any  # by name: update_docs.Results
_FIGURE = r"(\d(?:[\d.,]*\d)?)"


@dataclass(frozen=True)
class Sentence:
    """Words with ``{}`` for each figure, and what the figures are."""

    words: str
    figures: Callable[[Results], Sequence[str]]

    def find(self, text: str) -> re.Match[str]:
        """Return where a text has the words, however its lines are broken.

        Raises:
            ValueError: not exactly once.
        """
        parts = [r"\s+".join(map(re.escape, part.split(" "))) for part in self.words.split("{}")]
        found = list(re.finditer(_FIGURE.join(parts), text))
        if len(found) != 1:
            raise ValueError(
                f"{len(found)} times {self.words!r}; expected once: write it, or change"
                " tools/doc_sentences.py"
            )
        return found[0]

    def put(self, text: str, figures: Sequence[str]) -> str:
        """Return a text with these figures in the sentence."""
        found = self.find(text)
        if len(figures) != found.re.groups:
            raise ValueError(f"{len(figures)} figures for {self.words!r}")
        for i in range(len(figures), 0, -1):
            text = text[: found.start(i)] + figures[i - 1] + text[found.end(i) :]
        return text


def _row(document: Any, **wanted: Any) -> Any:
    (row,) = (r for r in document["records"] if all(r[k] == v for k, v in wanted.items()))
    return row


def _range(values: Iterable[float], form: str) -> list[str]:
    found = list(values)
    return [format(min(found), form), format(max(found), form)]


# ---- of each file -------------------------------------------------------------------------------

_SIZE = {"ranks": 64, "experts": 256, "slots": 2}
_FAMILIES = ("zipf0.6", "zipf1.0", "zipf1.4", "lognormal")


def _planner(results: Results) -> list[str]:
    rows = [_row(results["plan_sizes"], **_SIZE, family=family) for family in _FAMILIES]
    return [
        *_range((row["imbalance_before"] for row in rows), ".1f"),
        f"{max(row['imbalance']['worst'] for row in rows):.2f}",
        *_range((row["replicas"] for row in rows), ".0f"),
        *_range((row["time_us"]["p50"] for row in rows), ".0f"),
    ]


def _empty(results: Results) -> list[str]:
    return [f"{_row(results['empty_plan_4ranks'], op='empty plan')['time_us']['p50']:.0f}"]


def _example(results: Results) -> list[str]:
    claim = results["moe_example"]["claims"]["imbalance"]
    return [f"{float(claim['plain']):.1f}", f"{float(claim['replicated']):.2f}"]


def _worked_critbw(results: Results) -> list[str]:
    row = _row(results["replicate_4ranks_16M"], mode="auto")
    p50 = f"{row['time_us']['p50']:.1f}"
    algbw, critbw = f"{row['algbw_gbps']:.2f}", f"{row['critical_gbps']:.2f}"
    return [str(row["replicas"]), p50, str(row["expert_bytes"]), p50, algbw, algbw, critbw]


def _worked_reduction(results: Results) -> list[str]:
    row = _row(results["reduce_4ranks_16M"], mode="pull")
    algbw, critbw = f"{row['algbw_gbps']:.2f}", f"{row['critical_gbps']:.2f}"
    p50, replicas = f"{row['time_us']['p50']:.1f}", str(row["replicas"])
    return [p50, replicas, str(row["expert_bytes"]), algbw, algbw, critbw]


def _worked_model(results: Results) -> list[str]:
    row = _row(results["model_nvl72"], **_SIZE, load="imbalance1.5")
    bound, push = f"{row['bound_us']:.1f}", f"{row['time_us']['push']:.1f}"
    over = f"{row['over_bound']['push']['mean']:.3f}", f"{row['over_target']['push']['mean']:.3f}"
    return [bound, push, push, bound, over[0], push, bound, over[1]]


def _worked_link(results: Results) -> list[str]:
    links = results["links_4ranks"]
    slowest = links["slowest"][0]
    row = _row(links, source=slowest["source"], destination=slowest["destination"])
    return [
        *(str(row["source"]), str(row["destination"]), str(row["link_bytes"])),
        *(f"{row['time_us']['p50']:.1f}", f"{row['gbps']:.2f}", f"{links['median_gbps']:.2f}"),
        f"{100 * (1 - row['over_median']):.0f}",
    ]


def _auto(results: Results) -> list[str]:
    found = results["auto_over_24_plans"]
    return [str(len(found["records"])), f"{found['geometric_mean']:.3f}", f"{found['worst']:.3f}"]


def _reduction(results: Results) -> list[str]:
    rows = results["reduce_4ranks_16M"]["records"]
    return [
        *_range((row["over_copy_add"] for row in rows), ".2f"),
        *_range((row["speedup_over_gloo"] for row in rows), ".2f"),
    ]


def _layer(results: Results) -> list[str]:
    plain, replicated = (
        _row(results["layer_2ranks"], routing=routing) for routing in ("plain", "replicated")
    )
    return [
        f"{replicated['share_of_balanced']:.3f}",
        f"{plain['share_of_balanced']:.3f}",
        f"{100 * replicated['phases_share']:.1f}",
    ]


def _host_model(results: Results) -> list[str]:
    found = results["model_host_2ranks"]
    worst = f"{100 * found['worst_error']:.0f}"
    return [f"{100 * found['median_error']:.1f}", str(len(found["records"])), worst]


def _host_hop(results: Results) -> list[str]:
    return [f"{results['model_host_2ranks']['calibration']['hop_us']:.0f}"]


def _recorder(results: Results) -> list[str]:
    def of(recorder: str, column: str) -> list[float]:
        rows = (_row(results["recorder_cost"], recorder=recorder, ranks=ranks) for ranks in (8, 64))
        return [row[column] for row in rows]

    return [
        *(f"{us:.1f}" for us in of("without loads", "added_median_us")),
        *(f"{us:.1f}" for us in of("all", "added_median_us")),
        *(f"{us:.1f}" for us in of("off", "median_us")),
    ]


def _small(results: Results) -> list[str]:
    rows = results["small_4ranks_4M"]["records"]
    return _range((1 / row["over_memcpy"] for row in rows), ".1f")


# ---- of the model -------------------------------------------------------------------------------


def _over_bound(results: Results, way: str) -> list[str]:
    found = [row["over_bound"][way] for row in results["model_nvl72"]["records"]]
    digits = ".2f" if way == "push" else ".1f"
    worst = max(row["worst"] for row in found)
    return [
        *_range((row["mean"] for row in found), digits),
        f"{worst:.0f}" if way == "direct" else format(worst, digits),
    ]


def _over_bounds(results: Results) -> list[str]:
    return [text for way in ("push", "direct", "relay") for text in _over_bound(results, way)]


def _loads(results: Results) -> list[str]:
    loads: dict[Any, int] = {}
    for row in results["model_nvl72"]["records"]:
        size = row["ranks"], row["experts"], row["slots"]
        loads[size] = loads.get(size, 0) + row["loads"]
    (count,) = set(loads.values())
    return [str(count)]


def _direct(results: Results) -> list[str]:
    rows = results["model_nvl72"]["published"]
    off = max(abs(r["model_us"]["direct"] / r["published_us"]["direct"] - 1) for r in rows)
    return [f"{math.ceil(1000 * off) / 10:.1f}"]


def _relay(results: Results) -> list[str]:
    rows = results["model_nvl72"]["published"]
    return _range((r["published_us"]["relay"] / r["model_us"]["relay"] for r in rows), ".2f")


def _as_slow_as_the_relay(results: Results) -> list[str]:
    push = [row["model_us"]["push"] for row in results["model_nvl72"]["published"]]
    slower = max(float(text) for text in _relay(results))
    return [f"{slower * max(push):.0f}", f"{max(push):.0f}"]


def _least(_: Results) -> list[str]:
    machine = MACHINES["nvl72"]

    def beyond(replicas: int, group: int) -> str:
        forwarded = (replicas - 1) * group / machine.egress_gbps / 1e3
        return f"{machine.flag_us + 2 * machine.hop_us + forwarded:.1f}"

    return [beyond(2, 65536), beyond(63, 32768)]


def _machine(name: str) -> Callable[[Results], list[str]]:
    """Return the figures of a machine's line: rate, hop, ranks, and those between domains."""
    machine = MACHINES[name]
    near = [f"{machine.egress_gbps:g}", f"{machine.hop_us:g}", str(machine.domain_size)]
    far = [f"{machine.cross_gbps:g}", f"{machine.cross_us:g}"] if machine.cross_gbps else []
    return lambda _: [*near, *far]


def _latencies(_: Results) -> list[str]:
    machine = MACHINES["nvl72"]
    return [f"{us:g}" for us in (machine.hop_us, machine.deliver_us, machine.flag_us)]


def _bounds(results: Results) -> list[str]:
    """Return T* of the three plans of the sensitivity."""
    plans = _row(results["model_sensitivity"], change="as described")["plans"].values()
    return [f"{plan['bound_us']:.0f}" for plan in list(plans)[::2]]


def _worked_bound(_: Results) -> list[str]:
    links, num_bytes, over = 900, 2 * (36 << 20), 1.10
    bound = num_bytes / links / 1e3
    return [str(links), str(links), f"{bound:.1f}", f"{over * bound:.1f}", f"{over:.2f}"]


def _sensitive(results: Results, change: str) -> list[tuple[float, float]]:
    """Return the bound and what is beyond it of push and pull, for the plan with two imports."""
    plans = _row(results["model_sensitivity"], change=change)["plans"]
    found = [plans[f"64/256/2, two imports, {mode}"] for mode in ("push", "pull")]
    return [(plan["bound_us"], plan["beyond_us"]) for plan in found]


def _half_in_flight(results: Results) -> list[str]:
    found = _sensitive(results, "32 workers with 4 tiles each")
    return [f"{(b + beyond) / max(1.1 * b, b + 8):.2f}" for b, beyond in found]


def _large(results: Results) -> list[str]:
    return [f"{1 + beyond / b:.2f}" for b, beyond in _sensitive(results, "experts of 90 MB")]


def _fan_out(results: Results) -> list[str]:
    def over(mode: str) -> list[float]:
        rows = [r for r in results["model_fan_out"]["records"] if r["mode"] == mode]
        largest = max(row["size"] for row in rows)
        return [row["over_bound"] for row in rows if row["size"] == largest]

    return [
        *_range(over("push"), ".2f"),
        f"{max(over('direct')):.0f}",
        f"{max(over('relay')):.1f}",
    ]


_AUTO_LAYER = [
    Sentence("over {} plans: geometric mean {}, worst {}.", _auto),
    Sentence(
        "{} to {} of the machine's rate of copying and adding, {} to {} times as fast as sends and"
        " adds over gloo",
        _reduction,
    ),
    Sentence(
        "{} of the force-balanced ceiling with replicas, {} without; plan, replicate, reroute and"
        " reduce take {}% of the step",
        _layer,
    ),
    Sentence(
        "The model of the host engine is off by {}% in the median of {} plans, {}% at worst",
        _host_model,
    ),
    Sentence("An empty plan: {} us median", _empty),
    Sentence("two replicas of 4 MiB take {} to {} times as long as `memcpy`", _small),
]

SENTENCES: dict[str, list[Sentence]] = {
    "docs/usage.md": [
        Sentence(
            "that added {} us (8 ranks) and {} us (64) of the host's time to a call, in the median,"
            " and with loads {} and {} us, where a call without a recorder took {} and {} us",
            _recorder,
        ),
    ],
    "README.md": [
        Sentence("A call with nothing to move takes {} us", _empty),
        Sentence(
            "it brings loads whose busiest rank has {} to {} times the mean to {}, with {} to {}"
            " replicas, in {} to {} us on one core",
            _planner,
        ),
        Sentence("load falls from {} times the mean to {}, at worst", _example),
        Sentence(
            "push takes {} to {} times the bound; direct fan-out up to {}, the published relay up"
            " to {}",
            _fan_out,
        ),
    ],
    "docs/first-run.md": [
        Sentence("it falls from {} times the mean to {}", _example),
    ],
    "docs/model.md": [
        Sentence("That is {} us for one group of 64 KiB to one other replica, and {} us", _least),
        Sentence("Direct fan-out is reproduced within {}%.", _direct),
        Sentence("It takes {} to {} times what the model says of it", _relay),
        Sentence("it would take {} us where the model says {}", _as_slow_as_the_relay),
        Sentence(
            "**The host engine is off by {}% in the median of {} plans, and by {}% at worst**",
            _host_model,
        ),
        Sentence("A hop is long there, {} us", _host_hop),
        Sentence("72/288/2 (ranks/experts/slots), {} loads each", _loads),
        Sentence(
            "for a common plan (T* {} us), for one with two imports ({} us), and for one expert"
            " with 63 replicas ({} us)",
            _bounds,
        ),
        Sentence(
            "push takes {} to {} on average of a kind of load, and {} at worst; direct fan-out {}"
            " to {}, and {} at worst; the published relay, in the model, {} to {}, and {} at worst",
            _over_bounds,
        ),
        Sentence("with 128 of them this plan takes {} (push) and {} (pull)", _half_in_flight),
        Sentence("and the plan takes {} and {} times T*", _large),
        Sentence("{} GB/s is what was reached with them", lambda _: _machine("nvl72")(_)[:1]),
        Sentence("| `nvl72` | {} GB/s | {} us | {} ranks |", _machine("nvl72")),
        Sentence(
            "| `nvl72-racks` | {} GB/s | {} us | {} ranks | {} GB/s, {} us more",
            _machine("nvl72-racks"),
        ),
        Sentence("| `hgx8` | {} GB/s | {} us | {} ranks | {} GB/s, {} us more", _machine("hgx8")),
        Sentence(
            "Only the sum of {} us is calibrated: {} us until delivery and {} us for a flag",
            _latencies,
        ),
    ],
    "bench/METRICS.md": [
        Sentence(
            "the README's plan has R = {} replicas of 16 MiB, a rank that exports 2 experts, and"
            " ranks that import one. `auto` took {} us. algbw = 3 * {} B / {} us = {} GB/s; critbw"
            " = {} * 2 / 3 = {} GB/s",
            _worked_critbw,
        ),
        Sentence(
            "over links of {} GB/s give 2 * 37748736 B / {} GB/s = {} us; a p50 of {} us has"
            " `over_bound` {}",
            _worked_bound,
        ),
        Sentence(
            "`pull` takes {} us for {} replicas of {} B, so algbw is {} GB/s and, with 2 exports,"
            " critbw {} * 2 / 3 = {} GB/s",
            _worked_reduction,
        ),
        Sentence(
            "`imbalance1.5` T* is {} us in every load. Push takes {} us on average: {} / {} = {} of"
            " the bound, and {} / ({} + 8) = {} of the target",
            _worked_model,
        ),
        Sentence(
            "from {} to {}: {} B in {} us are {} GB/s, the median is {}, so it is {}% below",
            _worked_link,
        ),
    ],
    "bench/results/README.md": _AUTO_LAYER,
}

# Figures with a unit that are no results of this library, by a piece of text that holds them.
NO_RESULTS: dict[str, list[str]] = {
    "docs/benchmark.md": [
        "the 5% below are an example",
        "loads, each planned 5 times",
        "A GB200's NVLink carries 900 GB/s one way by its data sheet",
    ],
    "docs/model.md": [
        # published; test_model.py holds the model against them
        "direct times of 0.22, 0.27, 0.37, 0.47 and 0.52 ms",
        "fit each within 3%",
        "(0.24 to 0.29 ms at imbalances of 1.5 to 8)",
        "one expert with 90% of the load",  # an input
        "max(1.10 T*, T* + 8 us)",  # a target
        "450 GB/s by data sheet",
    ],
    "docs/problem.md": ["within 1% of the mean"],  # the planner's target
    "docs/usage.md": ["1% of balance may cost"],
    "bench/README.md": ["`--max-increase` (2% by default)"],
    "bench/METRICS.md": [
        "where it reaches 450 and 900 GB/s",  # rates of links
        # numbers to follow a formula by
        "With 100 us for every link of six ranks and 400 us for that from 2 to 0",
        "that cell has 2.5 GB/s",
        "the link is 75% below it",
        "empty 6 us, short 16 with next to no bytes, alone 116",
        "10^6 B / 80 us = 12.5 GB/s stored, 10^6 B / 20 us = 50 GB/s loaded, a hop of 5 us",
        "without the call itself, 100 us",
        # inputs and targets
        "max(1.10 T*, T* + 8 us)",
        "25 us for 64/256/2, 20 us for 64/128/2",
        "schedule and shares: 8 us more",
        "reroute of 8192 x 8: 15 us",
        "one expert with 90% of the load; 90% on the experts of one rank",
        "the first quarter of the experts 10 times as hot",
    ],
}
