"""Rows of tables: how a place in a result becomes a figure, and whether it meets its aim. Standard library only.

A path such as ``axes/*/wall`` leads through the result's objects; a part with one ``*`` leads to all keys of its form. A row's
``show`` turns each match into a figure, or into None where there is nothing to show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.paired import ratio as paired_ratio


@dataclass(frozen=True, slots=True)
class Aim:
    """A bound that the project set itself; ``text`` where the bound alone does not say it."""

    direction: Literal["≤", "≥"]
    bound: float
    text: str = ""

    def __str__(self) -> str:
        return self.text or f"{self.direction} {self.bound:g}"

    def is_met(self, value: float) -> bool | None:
        """None where there is no value to compare."""
        if math.isnan(value):
            return None
        return value <= self.bound if self.direction == "≤" else value >= self.bound


def at_most(bound: float, text: str = "") -> Aim:
    """An aim where less is better."""
    return Aim("≤", bound, text)


def at_least(bound: float, text: str = "") -> Aim:
    """An aim where more is better."""
    return Aim("≥", bound, text)


@dataclass(frozen=True, slots=True)
class Figure:
    """``value`` is compared with the row's aim, or with ``aim`` where the result itself holds the bound."""

    text: str
    value: float = math.nan
    aim: Aim | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """A place in a result: the keys that lead there, what each ``*`` matched, and the objects on the way."""

    keys: tuple[str, ...]
    names: tuple[str, ...]
    nodes: tuple[Any, ...]

    @property
    def node(self) -> Any:
        return self.nodes[-1]

    @property
    def parent(self) -> Any:
        return self.nodes[-2] if self.keys else None


Show = Callable[[Match], Figure | None]


def matches(path: str, result: Mapping[str, Any]) -> Iterator[Match]:
    """All places that ``path`` leads to, in the order of the result; an empty path leads to the result itself."""
    places = [Match((), (), (result,))]
    for part in path.split("/") if path else ():
        begin, star, end = part.partition("*")
        places = [
            Match(
                (*match.keys, key),
                (*match.names, key[len(begin) : len(key) - len(end)]) if star else match.names,
                (*match.nodes, match.node[key]),
            )
            for match in places
            if isinstance(match.node, Mapping)
            for key in match.node
            if (len(key) >= len(begin + end) and key.startswith(begin) and key.endswith(end) if star else key == part)
        ]
    yield from places


def interval(median: Mapping[str, Any]) -> str:
    """A median of paired ratios with its interval."""
    low, high = median["interval"]
    return f"{median['ratio']:.3f} ({low:.3f} to {high:.3f}, {median['pairs']} pairs)"


def _ratio(median: Mapping[str, Any], before: str = "", after: str = "") -> Figure:
    return Figure(
        f"{before}{interval(median)}{after}", round(median["ratio"], 3)
    )  # an aim is held against what is shown


def ratio(match: Match) -> Figure:
    """A median of paired ratios."""
    return _ratio(match.node)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table for each place that ``path`` leads to.

    ``label`` is a format: ``{0}`` is what the first ``*`` matched, ``{node[lr]}`` a field of the place, ``{parent[what]}`` one
    of the place above it. README shows rows with a ``headline``.
    """

    label: str
    path: str
    show: Show = ratio
    aim: Aim | None = None
    headline: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a table. ``is_met`` is None without an aim, and without a value to compare with it."""

    label: str
    headline: str
    figure: str
    aim: str
    is_met: bool | None


def lines(rows: Sequence[Row], result: Mapping[str, Any]) -> Iterator[Line]:
    """The lines of a result. What two rows would show of one place with one function, the first shows."""
    shown: set[tuple[tuple[str, ...], Show]] = set()
    for row in rows:
        for match in matches(row.path, result):
            figure = None if (match.keys, row.show) in shown else row.show(match)
            if figure is None:
                continue
            shown.add((match.keys, row.show))
            aim = figure.aim or row.aim
            yield Line(
                label=row.label.format(*match.names, node=match.node, parent=match.parent),
                headline=row.headline,
                figure=figure.text,
                aim=str(aim or ""),
                is_met=aim.is_met(figure.value) if aim else None,
            )


def largest_ratio(key: str) -> Show:
    """The largest of the ratios that the members of an object have under ``key``."""

    def show(match: Match) -> Figure | None:
        rows = {name: row[key] for name, row in match.node.items() if key in row}
        if not rows:
            return None
        worst = max(rows, key=lambda name: rows[name]["ratio"])
        return _ratio(rows[worst], before=f"{worst}: ")

    return show


def number(form: str) -> Show:
    """A number in the format ``form``."""
    return lambda match: Figure(form.format(match.node), match.node)


def text(match: Match) -> Figure:
    """A text of the result."""
    return Figure(str(match.node).replace("|", "/"))


def not_run(match: Match) -> Figure:
    """The reason why a contestant did not run."""
    return Figure(f"did not run: {match.node.replace('|', '/')}")


def size(match: Match) -> Figure:
    """Bytes."""
    return Figure(mib(match.node), match.node)


def mib(count: float) -> str:
    """Bytes in MiB."""
    return f"{count / 2**20:,.1f} MiB"


# --- contests of time over a baseline: ``benchmarks.rivals`` and ``benchmarks.data.contest`` --------------------------


def rival(match: Match) -> Figure | None:
    """A rival's time over ours in ``benchmarks.rivals``, None for ours."""
    row = match.node
    if "time_over_baseline" not in row:
        return None
    return _ratio(row["time_over_baseline"], after=f"; CPU {row['cpu_over_baseline']['ratio']:.3f}")


def fastest_rival(match: Match) -> Figure:
    """The rival with the smallest paired median over us, in ``benchmarks.rivals``."""
    rows = {name: row["time_over_baseline"] for name, row in match.node.items() if "time_over_baseline" in row}
    fastest = min(rows, key=lambda name: rows[name]["ratio"])
    return _ratio(rows[fastest], after=f", {fastest}")


def fastest_rival_by_default(match: Match) -> Figure:
    """As ``fastest_rival``; without a value on a processor without native bf16, where the aim says nothing."""
    figure = fastest_rival(match)
    if match.nodes[0]["bf16_native"]:
        return figure
    return Figure(f"{figure.text}; this processor has no native bf16")


def contestant(rate: str, unit: str) -> Show:
    """A contestant's rate and its speed over that of the baseline, which is the value."""

    def show(match: Match) -> Figure:
        row, baseline = match.node, match.nodes[-3]["baseline"]
        words, value = f"{row[rate]:,} {unit}", 1.0 if match.keys[-1] == baseline else math.nan
        if "time_over_baseline" in row:
            time = row["time_over_baseline"]
            low, high = time["interval"]
            value = 1 / time["ratio"]
            words += f"; {value:.2f} ({1 / high:.2f} to {1 / low:.2f}) times the speed of {baseline}"
        if "cpu_over_baseline" in row:
            words += f", {row['cpu_over_baseline']['ratio']:.2f} times its CPU time"
        if row.get("unlike"):
            words += f"; not like the others in {', '.join(row['unlike'])}"
        if not row.get("same_records", True):
            words += "; not the same records"
        return Figure(words, value)

    return show


def speed_over(one: str, other: str) -> Show:
    """The speed of ``one`` over that of ``other``: paired where rounds were recorded, else the quotient of two medians."""
    return lambda match: _speed_over(match.node, one, other)


def speed_over_fastest(one: str, ours: Sequence[str] = ("unisono",)) -> Show:
    """The smallest of the paired speeds of ``one`` over a rival; names that begin with one of ``ours`` are no rivals."""

    def show(match: Match) -> Figure | None:
        speeds = {
            name: _speed_over(match.node, one, name)
            for name, row in match.node["contestants"].items()
            if not name.startswith(tuple(ours)) and not row.get("unlike")
        }
        figures = {name: figure for name, figure in speeds.items() if figure}
        if not figures:
            return None
        fastest = min(figures, key=lambda name: figures[name].value)
        return Figure(f"{figures[fastest].text}, {fastest}", figures[fastest].value)

    return show


def _speed_over(outcome: Mapping[str, Any], one: str, other: str) -> Figure | None:
    rows, baseline = outcome["contestants"], outcome["baseline"]
    if one not in rows or other not in rows:
        return None
    if "round_s" in rows[one] and "round_s" in rows[other]:
        return _ratio(paired_ratio(rows[other]["round_s"], rows[one]["round_s"]))
    # runs that recorded no rounds
    if other in rows[one].get("speed_over", {}):
        return _ratio(rows[one]["speed_over"][other])
    if one == baseline:
        return _ratio(rows[other]["time_over_baseline"])
    other_s = rows[other]["time_over_baseline"]["ratio"] if other != baseline else 1.0
    value = other_s / rows[one]["time_over_baseline"]["ratio"]
    return Figure(f"{value:.3f}, quotient of two paired medians", round(value, 3))


# --- of one benchmark each ---------------------------------------------------------------------------------------------


def host_time(match: Match) -> Figure:
    cpu, wall = match.node["cpu_us"]["median"], match.node["wall_us"]["median"]
    share = 100 * match.node["cpu_share_of_step"]
    return Figure(f"{cpu:.0f} µs of CPU, {share:.2f} % of this step's; wall {wall:.0f} µs")


def start_of_job(match: Match) -> Figure:
    seconds = f"{match.node['trainer_s']['median']:.2f} s against {match.node['hand_s']['median']:.2f} s"
    return Figure(f"{interval(match.node['over_hand'])}; {seconds}")


def state_bytes(match: Match) -> Figure:
    difference = max(match.node["state_minus_expected_bytes"], key=abs)
    return Figure(
        f"{mib(max(match.node['state_bytes']))}, {difference:+,} bytes from what the plan says", abs(difference)
    )


def peak_bytes(match: Match) -> Figure:
    rounds = match.node["peaks_bytes"]
    low, high = min(rounds), max(rounds)
    return Figure(f"{mib(match.node['peak_bytes'])} ({mib(low)} to {mib(high)}, {len(rounds)} rounds)")


def of_none(key: str) -> Show:
    return lambda match: Figure(f"{mib(match.node[key])}, {match.node[f'{key}_over_none']:.3f} of none")


def ratio_but_none(match: Match) -> Figure | None:
    return None if "none" in match.names else ratio(match)


def compilations(match: Match) -> Figure:
    first, rest, after = (match.node[key] for key in ("first_step", "rest_of_first_epoch", "after_first_epoch"))
    words = f"{first} in the first step, {rest} in the rest of the first epoch, {after} in {match.node['steps']} steps"
    return Figure(f"{words} after it", after)


def losses_by_seed(match: Match) -> Figure:
    return Figure(", ".join(f"{loss:.3f}" for loss in match.node))


def difference_over_noise(match: Match) -> Figure:
    difference, noise = match.node["bf16_minus_fp32"], match.node["between_seeds"]
    value = abs(difference["mean"]) / noise
    return Figure(
        f"{value:.2f}: mean {difference['mean']:+.4f}, largest {difference['largest']:+.4f}; {noise:.4f}", value
    )


def extra_time(match: Match) -> Figure:
    over, (low, high) = match.node["extra_over_dcp_sync"], match.node["interval_over_dcp_sync"]
    return Figure(f"{over:.3f} ({low:.3f} to {high:.3f}, {match.node['windows']} windows)", over)


def waiting_time(match: Match) -> Figure:
    value = match.node / match.nodes[0]["dcp_sync_s"]
    return Figure(f"{value:.3f}", value)


def event_rate(match: Match) -> Figure:
    row = match.node
    if "cpu_us" in row:
        return Figure(f"{row['events_per_s']:,} events/s, {row['cpu_us']:.0f} µs CPU of the training thread each")
    return Figure(f"{row['events_per_cpu_s']:,} events per CPU second")


def distance_from_one(match: Match) -> Figure:
    """A ratio whose aim is 1, from either side."""
    return Figure(interval(match.node), abs(match.node["ratio"] - 1))


def rounds_right(match: Match) -> Figure:
    right, rounds = match.node["right"], match.node["rounds"]
    return Figure(f"{right} of {rounds} runs", right / rounds)


def num_findings(match: Match) -> Figure:
    findings = match.node["findings"]
    names = ", ".join(sorted({finding.split()[0] for finding in findings}))
    return Figure(f"{len(findings)} in {match.node['rounds']} runs" + (f": {names}" if names else ""), len(findings))


def answers(match: Match) -> Figure:
    """What each tool says of a fault, and whether that is right."""
    words: list[str] = []
    for tool, answer in match.node.items():
        right = {True: "right", False: "wrong", None: "not judged"}[answer["cause_right"]]
        if answer["cause_right"] and answer["rank_right"] is False:
            right = "right cause, not its rank"
        if false := answer.get("false_findings"):  # not in earlier runs
            right += f", {false} false finding{'s' * (false > 1)}"
        words.append(f"**{tool}**, {right}: {answer['says']}")
    return Figure("<br>".join(words).replace("|", "/"))


def right_of_total(match: Match) -> Figure:
    right, total = match.node["right"], match.node["total"]
    return Figure(f"{right} of {total}", right / total)


def num_false(match: Match) -> Figure | None:
    """The number of findings that have nothing to do with a fault; nothing for tools that give none."""
    return None if match.node is None else Figure(str(match.node), match.node)


def opening(match: Match) -> Figure:
    fresh, again = match.node["fresh_ms"], match.node["again_ms"]
    return Figure(f"{fresh:,} ms in a fresh process, {again:,} ms again", fresh)


def padding(prefix: str) -> Show:
    def show(match: Match) -> Figure:
        waste, cut = match.node[f"{prefix}waste_frac"], match.node[f"{prefix}cut_documents"]
        return Figure(f"{waste:.4f}; {cut:,} of {match.node['documents']:,} documents cut")

    return show


def repeated_and_lost(match: Match) -> Figure:
    worlds: dict[str, dict[str, int]] = match.node
    words = ", ".join(f"{world}: {row['repeated']} / {row['lost']}" for world, row in worlds.items())
    return Figure(words, sum(row["repeated"] + row["lost"] for row in worlds.values()))


def damage(match: Match) -> Figure:
    bit, cut = match.node["bit"]["verdict"], match.node["cut"]["verdict"]
    return Figure(f"one bit: {bit}; cut short: {cut}", sum("silent" in verdict for verdict in (bit, cut)))


def added_memory(match: Match) -> Figure:
    before, after = match.node["before_bytes"] / 2**20, match.node["after_bytes"] / 2**20
    return Figure(f"{after - before:,.0f} MiB to {before:,.0f}")


def tuning(match: Match) -> Figure:
    first, last = match.node["first_3_s"], match.node["last_3_s"]
    return Figure(f"{first:,.0f} samples/s in the first three seconds, {last:,.0f} in the last")


def milliseconds(match: Match) -> Figure:
    return Figure(", ".join(f"{name} {1e3 * row['median']:,.2f}" for name, row in match.node.items()))


def step_over_link(match: Match) -> Figure:
    row = match.node
    sent = f"{row['sent_bytes'] / 1e6:,.3f} MB sent, {row['theory_bytes'] / 1e6:,.3f} in theory"
    return Figure(f"{1e3 * row['step_s']['median']:,.0f} ms, {interval(row['over_none'])} of none; {sent}")


def loss_of_a_way(match: Match) -> Figure:
    row = match.node
    words = f"{loss_over_seeds(row)}; minus plain sums {minus_plain_sums(row)}"
    return Figure(words, row["over_plain"], at_most(row["band"], f"≤ {row['band']:+.3f}"))


def loss_over_seeds(row: Mapping[str, Any]) -> str:
    """The mean of a way's loss over seeds, and its standard deviation."""
    return f"{row['mean']:.3f}" + (f" ± {row['spread']:.3f}" if row["spread"] is not None else "")


def minus_plain_sums(row: Mapping[str, Any]) -> str:
    """The difference of a way's loss to that of plain sums."""
    return f"{row['over_plain']:+.3f}, {100 * (row['ratio'] - 1):+.1f} %"


def spread_of_seconds(match: Match) -> Figure:
    low, high = match.node["interval"]
    return Figure(
        f"{match.node['median']:.2f} s ({low:.2f} to {high:.2f}, {match.node['values']} times)", match.node["median"]
    )


def rates_by_size(match: Match) -> Figure:
    return Figure(", ".join(f"{size}: {rate:g}" for size, rate in match.node.items()) + " million positions/s")


def whole_process(match: Match) -> Figure:
    wall, cpu = match.node["wall_s"]["median"], match.node["cpu_s"]["median"]
    return Figure(f"{wall:.3f} s, CPU {cpu:.3f} s", wall)


def install_size(match: Match) -> Figure:
    install = match.node
    largest = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in list(install["largest_parts_bytes"].items())[:4])
    return Figure(f"{install['added_bytes'] / 2**20:.0f} MiB ({largest})")


def of_deduplicator(rows: str) -> Show:
    """Rate, memory, recall by kind of copy and precision of a command that finds duplicates."""

    def show(match: Match) -> Figure:
        row = match.node
        recall = ", ".join(f"{kind} {value:.3f}" for kind, value in row["recall"].items())
        rate, peak_mib = row["per_s"]["median"], row["peak_mib"]["median"]
        return Figure(f"{rate:,.0f} {rows}/s, {peak_mib:,.0f} MiB; recall: {recall}; precision {row['precision']:.3f}")

    return show


def cost_of_document(match: Match) -> Figure:
    """Time and peak memory at one size."""
    cost_us = match.node["us_per_document"]
    return Figure(
        f"{cost_us:.1f} us a document, {1e6 / cost_us:,.0f} documents/s, {match.node['peak_mib']:,.0f} MiB", cost_us
    )


def bits_by_seed(match: Match) -> Figure:
    """The median of the seeds, and each."""
    values = match.node["bits_per_byte"]
    return Figure(f"{match.node['median']:.3f} ({', '.join(f'{value:.3f}' for value in values)})")


def size_of_set(match: Match) -> Figure:
    return Figure(f"{match.node['rows']:,}, {match.node['mib']:.2f} MiB")


def prediction_error(match: Match) -> Figure:
    """Mean and median error of predictions, and that of the guess, which is to be halved unless the error is within a tenth.

    Judged are rows of sources that the constants have not seen.
    """
    row = match.node
    folds, sources = row["folds"], row["sources_left_out"]
    bound = max(0.1, row["guess"] / 2)
    return Figure(
        f"sources left out: {sources['mean']:.1%} (median {sources['median']:.1%}); random parts left out: "
        f"{folds['mean']:.1%} ({folds['median']:.1%}); guess: {row['guess']:.1%}; {row['rows']} rows of {row['sources']} sources",
        sources["mean"],
        at_most(bound, f"≤ {bound:.1%}"),
    )


def unseen_error(match: Match) -> Figure:
    """The same of rows that are in no fit."""
    row = match.node
    bound = max(0.1, row["guess"] / 2)
    documents = f"{row['sources']} document{'s' * (row['sources'] != 1)}"
    return Figure(
        f"{row['mean']:.1%} (median {row['median']:.1%}); guess: {row['guess']:.1%}; {row['rows']} rows of {documents}",
        row["mean"],
        at_most(bound, f"≤ {bound:.1%}"),
    )


def document_error(match: Match) -> Figure:
    """Mean and median error of the rows of one document."""
    row = match.node
    return Figure(f"{row['mean']:.1%} (median {row['median']:.1%}); {row['rows']} rows", row["mean"])


def search_time(match: Match) -> Figure:
    """Seconds of a search, with its aim, peak memory and the layouts that were compared, and traced."""
    row = match.node
    text = f"{row['wall_s']:.2f} s; {row['peak_mib']:.0f} MiB; {row['layouts']:,} layouts"
    if row.get("traced"):
        text += f", {row['traced']} traced; {row['cpu_s']:.1f} s of CPU"
    return Figure(text, row["wall_s"], at_most(row["aim_s"], f"≤ {row['aim_s']} s"))


def choice(match: Match) -> Figure:
    """Predicted step times of plans of the search over those of published plans."""
    row = match.node["predicted_over_published"]
    text = f"{row['median']:.2f} (nine of ten: {row['low']:.2f} to {row['high']:.2f}); {match.node['jobs']} jobs"
    return Figure(text, row["median"])


def fitting(match: Match) -> Figure:
    """How many published layouts are predicted to fit."""
    row = match.node
    return Figure(f"{row['fit']} of {row['of']}", row["fit"] / row["of"])


def memory_error(match: Match) -> Figure:
    """Median error of predicted memory, and the range of predicted over published."""
    row = match.node
    text = f"{row['median']:.1%}; {row['least']:.2f} to {row['most']:.2f} of the published; {row['rows']} rows"
    return Figure(text, row["median"])


def accuracy(match: Match) -> Figure:
    """Median error of predictions, and the range of predicted over measured."""
    row = match.node
    text = f"{row['median']:.1%}; {row['least']:.3f} to {row['most']:.3f} of the measured; {row['layouts']} layouts"
    return Figure(text, row["median"])


def ranking(match: Match) -> Figure:
    """Rank correlation and regret of a group of rows."""
    row = match.node
    text = f"{row['spearman']:.2f} ({row['layouts']} layouts, {row['rows']} rows)"
    return Figure(text, row["spearman"])


def regret(match: Match) -> Figure:
    """What the layout that is predicted to be the fastest of a group loses."""
    return Figure(f"{match.node['regret']:.1%}", match.node["regret"])


def constant(match: Match) -> Figure:
    """A fitted constant, and what a half more or less of it adds to the mean error."""
    return Figure(f"{match.node['value']:g}; error grows by {match.node['growth']:.2%}")
