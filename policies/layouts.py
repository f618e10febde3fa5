"""Ways to run one stage, as tables of numbers: every single agent, every cut over two agents, every split of the items.

A *chain* takes some share of the items through one or two agents. A *layout* is one to three chains side by side (lanes)
that together take all items. Tables hold what a layout costs, so that the search adds and compares arrays instead of
building plans; only what wins is turned into a `StagePlan`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from policies.costs import CostModel, ProfileSums
from policies.fleet import AgentView
from policies.ids import AgentId
from policies.latency import Floats
from policies.limits import may_hold
from policies.plan import GRAIN, Lane, Span, StagePlan, make_lane
from policies.service import ActivationFormat, OnnxStage
from policies.snapshot import ServiceView

Ints = npt.NDArray[np.int64]

MAX_CUTS = 7
MAX_PAIR_CHAINS = 25
MAX_TRIPLE_CHAINS = 12
MAX_SHARES = 7


@dataclass(frozen=True, slots=True)
class Terrain:
    """The agents that may be used, as rows of numbers; links from the entry and between agents in milliseconds."""

    agents: tuple[AgentView, ...]
    factor: Floats
    """[A] time over that of the reference core."""
    rtt: Floats
    """[A+1, A]; the last row is the entry."""
    jitter_variance: Floats
    ms_per_byte: Floats
    costs: CostModel

    def times(self, sums: ProfileSums) -> tuple[Floats, Floats]:
        """[A, B+1] what the blocks of a model take on each agent; see `CostModel.times_on`."""
        return self.costs.times_on(sums.model.name, [agent.id for agent in self.agents])

    def kinds(self) -> Ints:
        """[A] a number for each agent, the same for agents that are alike in speed, memory and place."""
        seen: dict[tuple[object, ...], int] = {}
        return np.array([
            seen.setdefault((a.platform, a.is_cloud, a.zone, a.memory_budget_bytes, round(float(f), 1)), len(seen))
            for a, f in zip(self.agents, self.factor, strict=True)
        ])  # fmt: skip

    @staticmethod
    def of(costs: CostModel, agents: Sequence[AgentView], entry: AgentId | None) -> Terrain:
        count = len(agents)
        rtt, jitter, per_byte = (np.zeros((count + 1, count)) for _ in range(3))
        for row, src in enumerate([*(agent.id for agent in agents), entry]):
            for column, dst in enumerate(agents):
                if src is None or src == dst.id:
                    continue
                link = costs.link(src, dst.id)
                rtt[row, column], jitter[row, column] = link.rtt_ms, link.jitter_ms**2
                per_byte[row, column] = 1000.0 / max(link.bandwidth_bytes_per_s, 1.0)
        factor = np.array([costs.agent_factor(agent.id) for agent in agents])
        return Terrain(tuple(agents), factor, rtt, jitter, per_byte, costs)


@dataclass(frozen=True, slots=True)
class Chains:
    """C chains of one model: costs per run (`fixed`) and per item."""

    head: Ints
    tail: Ints
    """Equal to `head` for a chain of one agent."""
    cut: Ints
    """First block of the tail; the number of blocks for a chain of one agent."""
    busy_fixed: Floats
    """[C, A]"""
    busy_item: Floats
    delay_fixed: Floats
    """[C] links and overhead."""
    delay_item: Floats
    jitter_variance: Floats
    link_item: Floats
    """[C] transfer time per item of the slowest link."""
    params: Floats
    """[C, A] bytes."""
    active: Floats
    """[C, A] one where the chain runs, for activations."""
    blocks: int = 1

    def __len__(self) -> int:
        return len(self.head)


@dataclass(frozen=True, slots=True)
class Table:
    """L layouts of one stage; rows index all arrays."""

    stage: OnnxStage
    chains: tuple[Chains, ...]
    """One per variant."""
    variants: tuple[str, ...]
    busy: Floats
    """[L, A] milliseconds per request."""
    delay: Floats
    """[L] expected time without queues."""
    variance: Floats
    jitter_variance: Floats
    link: Floats
    """[L] transfer time per request on the slowest link."""
    memory: Floats
    """[L, A]"""
    accuracy: Floats
    hops: Floats
    """[L] number of shards."""
    lanes: Ints
    """[L, 6]: variant, chain of each lane (-1: none), then where the shares of lanes 0 and 1 end."""

    def __len__(self) -> int:
        return len(self.delay)

    def take(self, rows: Ints) -> Table:
        names = ("busy", "delay", "variance", "jitter_variance", "link", "memory", "accuracy", "hops", "lanes")
        return Table(self.stage, self.chains, self.variants, *(getattr(self, name)[rows] for name in names))

    def signatures(self, names: Ints) -> Ints:
        """[L] what makes a layout a different idea, not just another share or cut: variant and the agents of each lane.

        `names` [A] says which agents count as the same.
        """
        base = int(names.max(initial=0)) + 1
        pairs = np.full((len(self), 3), -1, dtype=np.int64)
        for variant, chains in enumerate(self.chains):
            ends = names[chains.head] * base + names[chains.tail]
            rows = np.flatnonzero(self.lanes[:, 0] == variant)
            lanes = self.lanes[rows, 1:4]
            pairs[rows] = np.where(lanes < 0, -1, ends[lanes])
        pairs.sort(axis=1)
        packed = self.lanes[:, 0]
        for lane in range(3):
            packed = packed * (base * base + 1) + pairs[:, lane] + 1
        return np.asarray(packed)

    def stage_plan(self, row: int, terrain: Terrain) -> StagePlan:
        """The layout as a plan of its stage, without fallback."""
        variant, *rest = (int(x) for x in self.lanes[row])
        numbers, ends = [c for c in rest[:3] if c >= 0], [*rest[3:5], GRAIN]
        axis = self.stage.axis if len(numbers) > 1 else None
        lanes: list[Lane] = []
        start = 0
        for at, number in enumerate(numbers):
            stop = GRAIN if at == len(numbers) - 1 else ends[at]
            hops = self._hops(variant, number, terrain)
            lanes.append(make_lane(self.stage.name, self.stage.variants[variant], axis, Span(start, stop), hops))
            start = stop
        model = self.stage.variants[variant]
        return StagePlan(stage=self.stage.name, model=model, axis=axis, lanes=tuple(lanes))

    def _hops(self, variant: int, number: int, terrain: Terrain) -> tuple[tuple[AgentId, Span], ...]:
        chains = self.chains[variant]
        head, tail, cut = int(chains.head[number]), int(chains.tail[number]), int(chains.cut[number])
        if head == tail:
            return ((terrain.agents[head].id, Span(0, cut)),)
        return ((terrain.agents[head].id, Span(0, cut)), (terrain.agents[tail].id, Span(cut, chains.blocks)))


def chains_of(
    stage: OnnxStage, sums: ProfileSums, terrain: Terrain, view: ServiceView, hop_overhead_ms: float
) -> Chains | None:
    """All chains of one or two agents that zones and privacy allow; None when there is none."""
    whole = sums.whole
    cuts = np.array(choose_cuts(sums), dtype=np.int64)
    heads = [a for a, agent in enumerate(terrain.agents) if may_hold(agent, view.contract, stage, whole)]
    tails = [a for a, agent in enumerate(terrain.agents) if may_hold(agent, view.contract, stage, Span(1, whole.stop))]
    if not heads:
        return None
    # Each head by itself (written as its own tail, cut behind the last block), then with each tail at each cut.
    alone = np.array(heads, dtype=np.int64)
    two = np.array([(a, b) for a in heads for b in tails if a != b], dtype=np.int64).reshape(-1, 2)
    head = np.concatenate([alone, np.repeat(two[:, 0], len(cuts))])
    tail = np.concatenate([alone, np.repeat(two[:, 1], len(cuts))])
    cut = np.concatenate([np.full(len(alone), whole.stop), np.tile(cuts, len(two))])
    return _priced(head, tail, cut, sums, terrain, hop_overhead_ms, stage.activations)


def choose_cuts(sums: ProfileSums) -> list[int]:
    """At most `MAX_CUTS` block boundaries: spread over the run time, and the narrowest of each stretch."""
    if sums.whole.stop - 1 <= MAX_CUTS:
        return list(range(1, sums.whole.stop))
    reached = sums.fixed_ms[1:-1] + sums.per_item_ms[1:-1]
    buckets = reached * (MAX_CUTS / max(1e-9, float(sums.fixed_ms[-1] + sums.per_item_ms[-1])))
    buckets = np.minimum(buckets.astype(np.int64), MAX_CUTS - 1)
    order = np.lexsort((sums.cut_bytes("fp32")[1:-1], buckets))
    _, first = np.unique(buckets[order], return_index=True)
    return sorted((order[first] + 1).tolist())


def _priced(
    head: Ints,
    tail: Ints,
    cut: Ints,
    sums: ProfileSums,
    terrain: Terrain,
    hop_overhead_ms: float,
    how: ActivationFormat,
) -> Chains:
    count, blocks = len(terrain.agents), sums.whole.stop
    two = head != tail
    per_cut, convert = sums.cut_bytes(how), sums.convert_times(how)
    answer = per_cut[blocks]
    at_head = np.arange(len(head)) * count + head
    at_tail = (np.arange(len(head)) * count + tail)[two]

    def spread(prefix: Floats) -> Floats:
        """[C, A] what falls on each agent of a chain, from [A, B+1] prefix sums of each agent."""
        out = np.zeros(len(head) * count)
        out[at_head] = prefix[head, cut]
        out[at_tail] = (prefix[tail, -1] - prefix[tail, cut])[two]
        return out.reshape(-1, count)

    fixed, per_item = terrain.times(sums)
    first = terrain.ms_per_byte[count, head] * (per_cut[0] + answer)
    second = two * terrain.ms_per_byte[head, tail] * (per_cut[cut] + answer)
    active = np.zeros(len(head) * count)
    active[at_head] = active[at_tail] = 1.0
    return Chains(
        head=head, tail=tail, cut=cut,
        busy_fixed=spread(fixed),
        busy_item=spread(per_item),
        delay_fixed=terrain.rtt[count, head] + two * terrain.rtt[head, tail] + hop_overhead_ms * (1.0 + two),
        delay_item=first + second + two * convert[cut],
        jitter_variance=terrain.jitter_variance[count, head] + two * terrain.jitter_variance[head, tail],
        link_item=np.maximum(first, second),
        params=spread(np.broadcast_to(sums.param_bytes, (count, blocks + 1))),
        active=active.reshape(-1, count),
        blocks=blocks,
    )  # fmt: skip


def table_of(
    stage: OnnxStage, variants: Sequence[tuple[str, ProfileSums]], terrain: Terrain, costs: CostModel, view: ServiceView
) -> Table | None:
    """Every layout of a stage over all given variants; None when no agent may run it."""
    items = costs.items(view, stage)
    kept: list[Chains] = []
    names: list[str] = []
    parts: list[tuple[Floats, ...]] = []
    lanes: list[Ints] = []
    for name, sums in variants:
        chains = chains_of(stage, sums, terrain, view, costs.settings.hop_overhead_ms)
        if chains is None:
            continue
        splittable = stage.axis is not None and sums.model.split_axis is not None and round(items) >= 2
        layouts = _combinations(chains, items, splittable)
        layouts[:, 0] = stage.variants.index(name)
        reached = stage.accuracy(sums.model)
        parts.append(
            (*_costs_of(layouts, chains, sums, items, costs.settings.run_variation), np.full(len(layouts), reached))
        )
        lanes.append(layouts)
        names.append(name)
        kept.append(chains)
    if not parts:
        return None
    by_variant = dict(zip(names, kept, strict=True))
    chains_by_index = tuple(by_variant.get(name, kept[0]) for name in stage.variants)
    busy, delay, variance, jitter, link, memory, hops, accuracy = (
        columns[0] if len(columns) == 1 else np.concatenate(columns) for columns in zip(*parts, strict=True)
    )
    return Table(
        stage, chains_by_index, tuple(stage.variants), busy, delay, variance, jitter, link, memory, accuracy, hops,
        np.concatenate(lanes),
    )  # fmt: skip


def _combinations(chains: Chains, items: float, splittable: bool) -> Ints:
    """Rows of `Table.lanes` for one variant: each chain alone, then pairs and triples with shares."""
    alone = np.full((len(chains), 6), -1, dtype=np.int64)
    alone[:, 1], alone[:, 4:] = np.arange(len(chains)), GRAIN
    if not splittable:
        return alone
    speed = 1.0 / (chains.delay_item + chains.busy_item.sum(axis=1) + 1e-9)
    return np.concatenate([alone, _pairs(chains, items), _triples(chains, speed, items)])


def _pairs(chains: Chains, items: float) -> Ints:
    some = _varied(chains, MAX_PAIR_CHAINS)
    first, second = np.array(list(itertools.combinations(some, 2)), dtype=np.int64).reshape(-1, 2).T
    apart = chains.head[first] != chains.head[second]
    first, second = first[apart], second[apart]
    ends = np.array(_share_ends(items), dtype=np.int64)
    rows = np.full((len(first) * len(ends), 6), -1, dtype=np.int64)
    rows[:, 1], rows[:, 2] = np.repeat(first, len(ends)), np.repeat(second, len(ends))
    rows[:, 4], rows[:, 5] = np.tile(ends, len(first)), GRAIN
    return rows


def _triples(chains: Chains, speed: Floats, items: float) -> Ints:
    whole = round(items)
    some = list(itertools.combinations(_varied(chains, MAX_TRIPLE_CHAINS), 3)) if whole >= 3 else []
    trios = np.array(some, dtype=np.int64).reshape(-1, 3)
    heads = chains.head[trios]
    apart = (heads[:, 0] != heads[:, 1]) & (heads[:, 1] != heads[:, 2]) & (heads[:, 0] != heads[:, 2])
    trios = trios[apart]
    reached = np.cumsum(speed[trios], axis=1)
    one = np.clip(np.rint(whole * reached[:, 0] / reached[:, 2]), 1, whole - 2).astype(np.int64)
    two = np.clip(np.rint(whole * reached[:, 1] / reached[:, 2]), one + 1, whole - 1).astype(np.int64)
    rows = np.full((len(trios), 6), -1, dtype=np.int64)
    rows[:, 1:4] = trios
    rows[:, 4], rows[:, 5] = -(-one * GRAIN // whole), -(-two * GRAIN // whole)
    return rows


def _varied(chains: Chains, limit: int) -> list[int]:
    """Chains worth combining: those of one agent, then for each pair of agents the cuts that balance it best."""
    work = chains.busy_fixed + chains.busy_item
    hardest = work.max(axis=1) + chains.delay_item
    best: dict[tuple[int, int], list[int]] = {}
    for c in np.argsort(hardest, kind="stable"):
        best.setdefault((int(chains.head[c]), int(chains.tail[c])), []).append(int(c))
    ranked = sorted(best.items(), key=lambda pair: (pair[0][0] != pair[0][1], float(hardest[pair[1][0]])))
    rounds = [group[depth] for depth in range(2) for _, group in ranked if len(group) > depth]
    return rounds[:limit]


def _share_ends(items: float) -> list[int]:
    """Where the first of two lanes may end, so that a typical request is cut between items."""
    whole = round(items)
    counts = range(1, whole) if whole <= MAX_SHARES + 1 else {
        max(1, round(whole * at / (MAX_SHARES + 1))) for at in range(1, MAX_SHARES + 1)
    }  # fmt: skip
    return [_share_end(count, whole) for count in sorted(counts)]


def _share_end(count: int, whole: int) -> int:
    """The smallest share that holds `count` of `whole` items (see `policies.plan.items_of`)."""
    return min(GRAIN, -(-count * GRAIN // whole))


def _costs_of(layouts: Ints, chains: Chains, sums: ProfileSums, items: float, variation: float) -> tuple[Floats, ...]:
    """The columns of `Table`, from `busy` to `hops`, without `accuracy`; the layouts are each chain alone, then several side by side."""
    work = chains.busy_fixed + items * chains.busy_item
    alone = (
        work,
        chains.delay_fixed + items * chains.delay_item + work.sum(axis=1),
        np.square(variation * work).sum(axis=1) + chains.jitter_variance,
        chains.jitter_variance,
        items * chains.link_item,
        chains.params + chains.active * (sums.model.activation_bytes * max(1.0, items)),
        chains.active.sum(axis=1),
    )
    if len(layouts) == len(chains):
        return alone
    several = _costs_of_several(layouts[len(chains) :], chains, sums, items, variation)
    return tuple(np.concatenate(columns) for columns in zip(alone, several, strict=True))


def _costs_of_several(
    layouts: Ints, chains: Chains, sums: ProfileSums, items: float, variation: float
) -> tuple[Floats, ...]:
    count, agents = len(layouts), chains.busy_fixed.shape[1]
    busy, memory = np.zeros((count, agents)), np.zeros((count, agents))
    delay, variance, jitter, link, hops = (np.zeros(count) for _ in range(5))
    starts = np.zeros(count)
    for lane in range(3):
        number = layouts[:, 1 + lane]
        used = number >= 0
        if not used.any():
            break
        rows = np.flatnonzero(used)
        c = number[rows]
        last = (lane == 2) | (layouts[rows, min(2 + lane, 3)] < 0)
        stops = np.where(last, GRAIN, layouts[rows, 4 + min(lane, 1)]).astype(np.float64)
        share = items * (stops - starts[rows]) / GRAIN
        starts[rows] = stops
        work = chains.busy_fixed[c] + share[:, None] * chains.busy_item[c]
        busy[rows] += work
        memory[rows] += (
            chains.params[c] + chains.active[c] * (sums.model.activation_bytes * np.maximum(1.0, share))[:, None]
        )
        time = chains.delay_fixed[c] + share * chains.delay_item[c] + work.sum(axis=1)
        slower = time > delay[rows]
        spread = (variation * work) ** 2
        variance[rows] = np.where(slower, spread.sum(axis=1) + chains.jitter_variance[c], variance[rows])
        delay[rows] = np.maximum(delay[rows], time)
        jitter[rows] = np.maximum(jitter[rows], chains.jitter_variance[c])
        link[rows] = np.maximum(link[rows], share * chains.link_item[c])
        hops[rows] += chains.active[c].sum(axis=1)
    return busy, delay, variance, jitter, link, memory, hops
